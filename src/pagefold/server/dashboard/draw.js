"use strict";
/* Draws: elements, numbers in words, and charts on canvas and in SVG. It knows nothing of caches. All text that comes
   from the server goes through textContent. */
const draw = (() => {
  const SVG = "http://www.w3.org/2000/svg";

  /** Return a new element with properties, and children or text in it. */
  function el(name, props = {}, ...children) {
    const made = document.createElement(name);
    for (const [key, value] of Object.entries(props)) {
      if (key === "class") made.className = value;
      else if (key in made && !key.startsWith("aria")) made[key] = value;
      else made.setAttribute(key, value);
    }
    made.append(...children.map((child) => (child instanceof Node ? child : document.createTextNode(String(child)))));
    return made;
  }

  function svg(name, attributes, text) {
    const made = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    if (text !== undefined) made.textContent = text;
    return made;
  }

  /** A coloured block. Its style is set by script: the page's policy allows no style attributes in markup. */
  function swatch(colour, width, name = "i") {
    const made = el(name, { "aria-hidden": "true" });
    made.style.background = `var(--${colour})`;
    if (width !== undefined) made.style.width = `${width}%`;
    return made;
  }

  function dot(colour) {
    const made = swatch(colour, undefined, "span");
    made.className = "dot";
    return made;
  }

  let whole = null; // it takes long to make, so it is made when it is first needed
  const num = (value) => (whole ??= new Intl.NumberFormat("en")).format(Math.round(value));
  const percent = (share) => `${(100 * share).toFixed(share > 0 && share < 0.1 ? 1 : 0)} %`;

  function seconds(s) {
    if (s < 0.0005) return "0";
    if (s < 1) return `${num(s * 1e3)} ms`;
    return s < 90 ? `${s.toFixed(s < 10 ? 2 : 1)} s` : `${Math.floor(s / 60)} min ${num(s % 60)} s`;
  }

  function ago(s) {
    if (s < 90) return `${num(s)} s ago`;
    return s < 5400 ? `${num(s / 60)} min ago` : `${num(s / 3600)} h ago`;
  }

  function bytes(n) {
    for (const [size, unit] of [[2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]]) {
      if (n >= size) return `${(n / size).toPrecision(3)} ${unit}`;
    }
    return `${num(n)} B`;
  }

  const colours = new Map();

  /** Return what a colour's name is on the page now, light or dark. */
  function colour(name) {
    if (!colours.has(name)) colours.set(name, resolved(name));
    return colours.get(name);
  }

  function resolved(name) {
    const probe = document.documentElement.appendChild(document.createElement("span"));
    probe.style.color = `var(--${name})`;
    const found = getComputedStyle(probe).color;
    probe.remove();
    return found;
  }

  /**
   * A chart over time on a canvas, with a sentence on the column that is pointed at, and a table behind it.
   * `kind` is "cells" (so many blocks, each cell some of them) or "columns" (counts that grow from 0).
   */
  class TimeChart {
    constructor(parent, { label, kind, rows, sampled }) {
      this.label = label;
      this.kind = kind;
      this.rows = rows;
      this.sampled = sampled; // a column of several pieces shows the last of them, and not their sum
      this.at = null;
      this.canvas = el("canvas", { role: "img", tabIndex: 0 });
      this.said = el("output", { class: "said" });
      this.from = el("span", {}, "");
      this.legend = el("ul", { class: "legend" });
      this.table = el("table");
      this.behind = el("details", {}, el("summary", {}, "As a table"), el("div", { class: "scroll" }, this.table));
      const axis = el("div", { class: "axis", "aria-hidden": "true" }, this.from, el("span", {}, "now"));
      parent.append(el("div", { class: "chart" }, this.canvas, axis, this.said), this.legend, this.behind);
      this.canvas.addEventListener("pointermove", (event) => this.point(event.offsetX / this.canvas.clientWidth));
      this.canvas.addEventListener("pointerleave", () => this.point(null));
      this.canvas.addEventListener("blur", () => this.point(null));
      this.canvas.addEventListener("keydown", (event) => this.key(event));
      this.behind.addEventListener("toggle", () => this.write());
      const redraw = () => { if (this.canvas.clientWidth !== this.width) this.draw(); };
      new ResizeObserver(() => requestAnimationFrame(redraw)).observe(this.canvas.parentElement);
    }

    /**
     * Show series: {label, colour, now, counts}; `top` is the most that a column can have, where that is known, and
     * `rest` the colour of what it lacks to that.
     */
    show({ series, pieceS, top, rest, unit, summary }) {
      Object.assign(this, { series, pieceS, top, rest, unit });
      this.canvas.setAttribute("aria-label", `${this.label}. ${summary}`);
      const entries = rest ? [...series, rest] : series;
      this.legend.replaceChildren(
        ...entries.map((one) => el("li", {}, dot(one.colour), one.label, el("b", {}, num(one.now)))),
      );
      this.draw();
      this.write();
    }

    /** Return the columns that fit: arrays of counts, by series, and how many pieces each is made of. */
    columns() {
      const n = this.series[0].counts.length;
      const least = this.kind === "cells" ? 5 : 4;
      const group = Math.max(1, Math.ceil((n * least) / Math.max(1, this.canvas.clientWidth)));
      const made = [];
      for (let end = n; end > 0; end -= group) {
        const begin = Math.max(0, end - group);
        made.unshift(
          this.series.map((one) => {
            const part = one.counts.slice(begin, end);
            return this.sampled ? part[part.length - 1] : part.reduce((sum, count) => sum + (count ?? 0), 0);
          }),
        );
      }
      return { made, group };
    }

    draw() {
      const width = this.canvas.clientWidth;
      if (!this.series || !width) return;
      this.width = width;
      const { made, group } = this.columns();
      this.drawn = { made, group };
      const step = width / made.length;
      const cell = this.kind === "cells" ? step : 0;
      const height = Math.round(cell ? cell * this.rows : 110);
      const ratio = devicePixelRatio || 1;
      this.canvas.style.height = `${height}px`;
      this.canvas.width = Math.round(width * ratio);
      this.canvas.height = Math.round(height * ratio);
      const pen = this.canvas.getContext("2d");
      pen.scale(ratio, ratio);
      const colours = this.series.map((one) => colour(one.colour));
      const empty = colour("free");
      const sums = made.map((counts) => counts.reduce((sum, count) => sum + (count ?? 0), 0));
      const top = this.top || Math.max(1, ...sums);
      const highest = this.top ? "" : ` · highest ${num(top)} ${this.unit} in ${num(group * this.pieceS)} s`;
      this.from.textContent = `${ago(this.series[0].counts.length * this.pieceS)}${highest}`;
      const gap = Math.min(1, step / 5);
      made.forEach((counts, column) => {
        const left = column * step;
        if (cell) {
          let row = 0;
          const fill = (style, upTo) => {
            pen.fillStyle = style;
            for (; row < upTo; row += 1) pen.fillRect(left, height - (row + 1) * cell, cell - gap, cell - gap);
          };
          let whole = 0;
          if (counts[0] !== null) {
            counts.forEach((count, index) => {
              whole += count;
              const exact = (whole / top) * this.rows;
              fill(colours[index], Math.min(this.rows, count ? Math.max(row + 1, Math.round(exact)) : row));
            });
          }
          pen.globalAlpha = counts[0] === null ? 0.45 : 1;
          fill(empty, this.rows);
          pen.globalAlpha = 1;
        } else {
          let base = height;
          pen.fillStyle = empty;
          pen.fillRect(left, height - 1, step - gap, 1);
          counts.forEach((count, index) => {
            if (!count) return;
            const tall = Math.max(1, (count / top) * (height - 2));
            pen.fillStyle = colours[index];
            pen.fillRect(left, base - tall, step - gap, tall);
            base -= tall;
          });
        }
      });
      if (this.at !== null) {
        pen.strokeStyle = colour("ink");
        pen.lineWidth = 1.5;
        pen.strokeRect(this.at * step + 0.25, 0.75, Math.max(2, step - 0.5), height - 1.5);
        this.said.textContent = this.sentence(this.at);
      } else {
        this.said.textContent = "";
      }
    }

    sentence(column) {
      const { made, group } = this.drawn;
      const counts = made[column];
      const when = ago((made.length - 1 - column) * group * this.pieceS);
      if (counts[0] === null) return `${when}: nothing is known`;
      const told = this.series.map((one, index) => `${one.label} ${num(counts[index])}`);
      const all = counts.reduce((sum, count) => sum + count, 0);
      if (this.rest) told.push(`${this.rest.label} ${num(Math.max(0, this.top - all))}`);
      return `${when}: ${told.join(", ")}`;
    }

    point(share) {
      const n = this.drawn ? this.drawn.made.length : 0;
      this.at = share === null || !n ? null : Math.min(n - 1, Math.max(0, Math.floor(share * n)));
      this.draw();
    }

    key(event) {
      const n = this.drawn ? this.drawn.made.length : 0;
      const moves = { ArrowLeft: -1, ArrowRight: 1, Home: -n, End: n };
      if (!n || !(event.key in moves)) return;
      event.preventDefault();
      this.at = Math.min(n - 1, Math.max(0, (this.at ?? n) + moves[event.key]));
      this.draw();
    }

    /** Write the table, if it is open: a row a minute. */
    write() {
      if (!this.behind.open || !this.series) return;
      const n = this.series[0].counts.length;
      const group = Math.max(1, Math.round(60 / this.pieceS));
      const head = el("tr", {}, el("th", { scope: "col" }, "minute"));
      for (const one of this.series) head.append(el("th", { scope: "col", class: "num" }, one.label));
      const body = el("tbody");
      for (let end = n; end > 0; end -= group) {
        const row = el("tr", {}, el("th", { scope: "row" }, end === n ? "last" : ago((n - end) * this.pieceS)));
        for (const one of this.series) {
          const part = one.counts.slice(Math.max(0, end - group), end);
          const count = this.sampled ? part[part.length - 1] : part.reduce((sum, each) => sum + (each ?? 0), 0);
          row.append(el("td", { class: "num" }, count === null ? "–" : num(count)));
        }
        body.append(row);
      }
      this.table.replaceChildren(el("caption", { class: "unseen" }, this.label), el("thead", {}, head), body);
    }
  }

  /** Show items as bars of one scale: {label, value, shown, note, colour}. */
  function bars(list, items, none) {
    const most = Math.max(1, ...items.map((item) => item.value));
    const made = items.map((item) => {
      const bar = el("div", { class: "bar" }, swatch(item.colour, (100 * item.value) / most));
      const line = el("div", { class: "line" }, el("span", {}, item.label), el("span", {}, item.shown));
      return el("li", {}, line, bar, ...(item.note ? [el("div", { class: "remedy" }, item.note)] : []));
    });
    list.replaceChildren(...(made.length ? made : [el("li", { class: "note" }, none)]));
  }

  /** Return curves as SVG: lines {label, colour, isThick, points: [{x, y}]}, y from 0 to 1, x from 0; `mark` is an x. */
  function curves(lines, { label, xLabel, mark, markLabel }) {
    const [width, height, left, bottom] = [560, 260, 46, 44];
    const widest = Math.max(1, mark || 0, ...lines.flatMap((line) => line.points.map((point) => point.x)));
    const highest = Math.max(0.05, ...lines.flatMap((line) => line.points.map((point) => point.y)));
    const top = Math.min(1, Math.ceil(highest * 10) / 10);
    const x = (value) => left + ((width - left - 10) * value) / widest;
    const y = (value) => height - bottom - ((height - bottom - 12) * value) / top;
    const made = svg("svg", { viewBox: `0 0 ${width} ${height}`, class: "curve", role: "img", "aria-label": label });
    for (let part = 0; part <= 4; part += 1) {
      const at = (top * part) / 4;
      made.append(
        svg("line", { x1: left, x2: width - 10, y1: y(at), y2: y(at), stroke: "var(--line)" }),
        svg("text", { x: left - 6, y: y(at) + 4, "text-anchor": "end" }, percent(at)),
      );
    }
    made.append(
      svg("text", { x: left, y: height - bottom + 16 }, "0"),
      svg("text", { x: width - 10, y: height - bottom + 16, "text-anchor": "end" }, `${num(widest)} ${xLabel}`),
    );
    if (mark) {
      made.append(
        svg("line", { x1: x(mark), x2: x(mark), y1: 10, y2: height - bottom, stroke: "var(--ink)", "stroke-dasharray": "3 3" }),
        svg("text", { x: Math.max(left + 30, Math.min(x(mark), width - 40)), y: height - bottom + 32, "text-anchor": "middle" }, markLabel),
      );
    }
    for (const line of lines) {
      const points = line.points.map((point) => `${x(point.x).toFixed(1)},${y(point.y).toFixed(1)}`).join(" ");
      made.append(svg("polyline", {
        points, fill: "none", stroke: `var(--${line.colour})`, "stroke-width": line.isThick ? 3.5 : 1.6, "stroke-linejoin": "round",
      }));
    }
    return made;
  }

  return { el, dot, swatch, num, percent, seconds, ago, bytes, TimeChart, bars, curves, forget: () => colours.clear() };
})();

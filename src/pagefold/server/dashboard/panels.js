"use strict";
/* Panels: what the answer of /v1/dashboard looks like. Each function shows one part of it. */
const panels = (() => {
  const { el, dot, swatch, num, percent, seconds, ago, bytes } = draw;
  const $ = (id) => document.getElementById(id);
  const sum = (counts) => counts.reduce((all, count) => all + (count ?? 0), 0);

  const TIERS = { device: "The device", host: "The host's memory", disk: "The disk", remote: "The remote store" };
  const BLOCKS = { held: "held by requests", pinned: "pinned", cached: "cached" };
  const PARTS = [
    ["queue_s", "waited", "waits"],
    ["fetch_s", "fetched from tiers", "pinned"],
    ["prefill_s", "prompt", "held"],
    ["decode_s", "output", "cached"],
  ];
  const EVICTED = ["cached", "pinned", "held", "waits", "found", "bad"];
  const MOST_CAUSES = 6;

  function figures(told) {
    const { engine, lookups, tiers } = told;
    const hits = sum(lookups.device) + sum(lookups.tiers);
    const all = hits + sum(lookups.computed);
    const waiting = engine.waiting_for_capacity + engine.waiting_for_tiers;
    const device = tiers[0];
    const set = (id, text, more) => $(id).replaceChildren(text, ...(more ? [el("small", {}, ` ${more}`)] : []));
    set("f-rate", num(engine.output_tokens_per_s));
    set("f-running", num(engine.running));
    set("f-waiting", num(waiting), engine.waiting_for_tiers ? `${num(engine.waiting_for_tiers)} for tiers` : "");
    set("f-found", all ? percent(hits / all) : "–", all ? `of ${num(all)}` : "");
    set("f-held", device.num_blocks ? percent(device.now.held / device.num_blocks) : "–", device.num_blocks ? `of ${num(device.num_blocks)}` : "");
  }

  const charts = new Map();

  function chart(key, parent, options) {
    if (!charts.has(key)) charts.set(key, new draw.TimeChart(parent, options));
    return charts.get(key);
  }

  function tierBox(tier) {
    const id = `tier-${tier.name}`;
    if (!$(id)) {
      $("tiers").append(el("div", { class: "tier", id }, el("h3", {}, TIERS[tier.name] ?? tier.name, " ", el("span"))));
    }
    return $(id);
  }

  function tiers(told) {
    for (const tier of told.tiers) {
      const box = tierBox(tier);
      const name = TIERS[tier.name] ?? tier.name;
      const said = box.querySelector("h3 span");
      if (tier.num_blocks) {
        const shown = Object.keys(tier.series).filter((what) => BLOCKS[what]);
        const tokens = tier.num_blocks * told.block_size;
        said.textContent = `${num(tier.num_blocks)} blocks, ${num(tokens)} tokens`;
        const rows = tier.name === "device" ? 16 : 8;
        const series = shown.map((what) => ({
          label: BLOCKS[what], colour: what, now: tier.now[what], counts: tier.series[what],
        }));
        const words = series.map((one) => `${num(one.now)} ${one.label}`).join(", ");
        chart(tier.name, box, { label: `${name}: blocks over ten minutes`, kind: "cells", rows, sampled: true }).show({
          series, pieceS: told.piece_s, top: tier.num_blocks, unit: "blocks",
          rest: { label: "free", colour: "free", now: tier.now.free }, summary: `Now ${words}, ${num(tier.now.free)} free.`,
        });
      }
      if (tier.is_fast !== null) moved(told, tier, box, name, said);
    }
  }

  /** Of a slow tier: what came from there and went there. What it has is above it, where it knows. */
  function moved(told, tier, box, name, said) {
    const pace = tier.is_fast ? "sooner than computing" : "computing is sooner";
    const has = tier.num_blocks ? `${num(tier.num_blocks)} blocks, ${num(tier.num_blocks * told.block_size)} tokens; ` : "";
    said.textContent = `${has}${bytes(tier.now.read_bytes)} read in ten minutes; ${pace}`;
    const series = [
      { label: "read", colour: "found", now: tier.now.read, counts: tier.series.read },
      { label: "written", colour: "waits", now: tier.now.written, counts: tier.series.written },
    ];
    chart(`${tier.name}-moved`, box, { label: `${name}: blocks moved over ten minutes`, kind: "columns" }).show({
      series, pieceS: told.piece_s, unit: "blocks",
      summary: `${num(tier.now.read)} read, ${num(tier.now.unread)} asked for in vain, ${num(tier.now.written)} written.`,
    });
  }

  function found(told) {
    const { device, tiers: behind, computed } = told.lookups;
    const series = [
      { label: "found on the device", colour: "cached", now: sum(device), counts: device },
      { label: "found in tiers", colour: "found", now: sum(behind), counts: behind },
      { label: "computed", colour: "held", now: sum(computed), counts: computed },
    ];
    chart("found", $("found"), { label: "Tokens of prompts over ten minutes", kind: "columns" }).show({
      series, pieceS: told.piece_s, unit: "tokens",
      summary: series.map((one) => `${num(one.now)} ${one.label}`).join(", "),
    });
    const items = told.misses.slice(0, MOST_CAUSES).map((miss) => ({
      label: `${miss.cause.replaceAll("_", " ")}: ${miss.told}`, value: miss.tokens, shown: `${num(miss.tokens)} tokens`,
      note: miss.remedy, colour: "held",
    }));
    draw.bars($("causes"), items, "Nothing was computed in the last ten minutes.");
  }

  function gone(told) {
    const series = told.evictions.map((one, index) => ({
      label: one.told, colour: EVICTED[index % EVICTED.length], now: one.blocks, counts: one.series,
    }));
    const zeros = new Array(told.num_pieces).fill(0);
    const nothing = [{ label: "evicted", colour: "cached", now: 0, counts: zeros }];
    const all = series.reduce((blocks, one) => blocks + one.now, 0);
    chart("gone", $("gone"), { label: "Blocks evicted over ten minutes", kind: "columns" }).show({
      series: series.length ? series : nothing, pieceS: told.piece_s, unit: "blocks", summary: `${num(all)} in all`,
    });
    const items = series.map((one, index) => ({
      label: told.evictions[index].rule === "policy" ? `${told.policy}: ${one.label}` : one.label,
      value: one.now, shown: `${num(one.now)} blocks`, colour: one.colour,
    }));
    draw.bars($("rules"), items, "Nothing had to go in the last ten minutes.");
    if (told.engine.preemptions) {
      $("rules").append(el("li", { class: "note" }, `${num(told.engine.preemptions)} times a running request gave its memory to another.`));
    }
  }

  function requests(told, ask) {
    const rows = told.requests;
    $("no-requests").hidden = rows.length > 0;
    $("no-requests").textContent = told.explains ? "None has ended yet." : "This server remembers none: it was started with --no-enable-explain.";
    const total = (one) => PARTS.reduce((all, [part]) => all + one[part], 0);
    const longest = Math.max(1e-9, ...rows.map(total));
    if (!$("parts").children.length) {
      $("parts").append(...PARTS.map(([, label, colour]) => el("li", {}, dot(colour), label)));
    }
    const focused = document.activeElement?.dataset?.request;
    $("requests").replaceChildren(...rows.map((one) => {
      const strip = el("div", { class: "strip", "aria-hidden": "true" });
      for (const [part, , colour] of PARTS) {
        if (one[part] > 0) strip.append(swatch(colour, (100 * one[part]) / longest));
      }
      const words = PARTS.filter(([part]) => one[part] >= 0.0005).map(([part, label]) => `${label} ${seconds(one[part])}`);
      const hits = one.device_tokens + one.tier_tokens;
      const button = el("button", { type: "button", "aria-label": `Why: request ${one.id}` }, shortId(one.id));
      button.dataset.request = one.id;
      button.addEventListener("click", () => ask(one.id));
      const cause = one.cause === null ? "–" : one.cause.replaceAll("_", " ");
      return el("tr", {},
        el("td", {}, button, el("span", { class: "sub" }, `${one.tenant ? `${one.tenant}, ` : ""}${ago(one.ago_s)}`)),
        el("td", {}, strip, el("span", { class: "sub" }, `${seconds(total(one))}: ${words.join(", ") || "nothing"}`)),
        el("td", {}, one.prompt_tokens ? percent(hits / one.prompt_tokens) : "–",
          el("span", { class: "sub" }, `${num(hits)} of ${num(one.prompt_tokens)}${one.tier_tokens ? `, ${num(one.tier_tokens)} from tiers` : ""}`)),
        el("td", { class: "some" }, num(one.output_tokens), el("span", { class: "sub" }, one.finish_reason)),
        el("td", {}, cause, el("span", { class: "sub" }, one.cause_tokens ? `${num(one.cause_tokens)} tokens` : "")));
    }));
    if (focused) [...$("requests").querySelectorAll("button")].find((one) => one.dataset.request === focused)?.focus();
  }

  const shortId = (id) => id.replace(/^(\w+-)?(.{0,6}).*?(-\d+)?$/, (_, kind, head, index) => `${kind ?? ""}${head}${index && index !== "-0" ? index : ""}`);

  function prefixes(told) {
    const rows = told.prefixes;
    $("no-prefixes").hidden = rows.length > 0;
    const most = Math.max(1, ...rows.map((one) => one.tokens * one.finds));
    $("prefixes").replaceChildren(...rows.map((one) => {
      const saved = one.tokens * one.finds;
      const strip = el("div", { class: "strip", "aria-hidden": "true" }, swatch(one.is_cached ? "cached" : "waits", (100 * saved) / most));
      return el("tr", { class: one.is_cached ? "" : "faded" },
        el("td", {}, el("span", { class: "mono" }, one.name), el("span", { class: "sub" }, `${one.tenant ? `${one.tenant}, ` : ""}${ago(one.ago_s)}${one.is_cached ? "" : ", gone"}`)),
        el("td", { class: "num" }, num(one.tokens), el("span", { class: "sub" }, `${num(one.blocks)} blocks`)),
        el("td", { class: "num" }, `${num(one.finds)} ×`),
        el("td", {}, strip, el("span", { class: "sub" }, `${num(saved)} tokens`)));
    }));
  }

  /** Show what other sizes and policies would give; nothing where that is not known. */
  function whatif(told) {
    const lines = (told?.policies ?? []).filter((one) => one.points.length);
    $("whatif").hidden = !lines.length;
    if (!lines.length) return;
    const colours = ["cached", "held", "found", "pinned", "bad", "waits"];
    const drawn = lines.map((one, index) => ({
      label: one.policy, colour: colours[index % colours.length], isThick: one.is_used,
      points: one.points.map((point) => ({ x: point.num_blocks, y: point.hit_ratio })),
    }));
    $("whatif-told").textContent = told.told ?? "";
    const table = el("table", {}, el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "policy"),
      el("th", { scope: "col", class: "num" }, "blocks"), el("th", { scope: "col", class: "num" }, "memory"),
      el("th", { scope: "col", class: "num" }, "found"))));
    const body = table.appendChild(el("tbody"));
    for (const one of lines) {
      for (const point of one.points) {
        body.append(el("tr", {}, el("th", { scope: "row" }, one.policy), el("td", { class: "num" }, num(point.num_blocks)),
          el("td", { class: "num" }, bytes(point.bytes)), el("td", { class: "num" }, percent(point.hit_ratio))));
      }
    }
    const isOpen = $("curve").querySelector("details")?.open ?? false;
    const best = lines.map((one) => `${one.policy} ${percent(one.points[one.points.length - 1].hit_ratio)}`).join(", ");
    $("curve").replaceChildren(
      draw.curves(drawn, {
        label: `Share of prompt tokens found, by blocks and policy. At most: ${best}`,
        xLabel: "blocks", mark: told.num_blocks, markLabel: "as it is",
      }),
      el("ul", { class: "legend" }, ...drawn.map((one) => el("li", {}, dot(one.colour), one.isThick ? el("b", {}, `${one.label}, in use`) : one.label))),
      el("details", { open: isOpen }, el("summary", {}, "As a table"), el("div", { class: "scroll" }, table)),
    );
  }

  /** Show advice; nothing where there is none. */
  function advice(told) {
    const items = told?.data ?? [];
    $("advice").hidden = !items.length;
    $("advices").replaceChildren(...items.map((one) => el("li", {}, el("strong", {}, one.told),
      el("div", {}, one.remedy ?? ""),
      el("div", { class: "note" }, `${num(one.tokens)} tokens of ${num(one.num_requests)} requests, ${percent(one.share_of_prompt_time)} of all prompt time`))));
  }

  /** Show why a request found what it found: what /v1/explain tells. */
  function why(id, told) {
    $("why-head").textContent = id;
    const list = el("ol");
    for (const one of told?.requests ?? []) {
      for (const miss of [...one.misses, ...one.recomputed]) {
        const item = el("li", {}, el("strong", {}, `${num(miss.tokens)} tokens from ${num(miss.start)} on: `), `${miss.told}${miss.fields.length ? `: ${miss.fields.join(", ")}` : ""}.`);
        const { difference, eviction } = miss;
        if (difference) {
          const text = difference.own_text === null ? "" : `\n… ${difference.text_before}\nhere   ${difference.own_text}\nthere  ${difference.nearest_text}`;
          item.append(el("div", { class: "said mono" }, `token ${num(difference.token)} differs from ${difference.nearest}${text}`));
        }
        if (eviction) {
          item.append(el("div", { class: "note" }, `Gone ${seconds(eviction.ago_s)} before${eviction.policy ? ` by ${eviction.policy}` : ""}${eviction.for ? ` for ${eviction.for}` : ""}.`));
        }
        if (miss.remedy) item.append(el("div", { class: "note" }, miss.remedy));
        list.append(item);
      }
      for (const wait of one.waits) list.append(el("li", { class: "note" }, `Waited ${num(wait.ms)} ms: ${wait.told}.`));
    }
    if (!list.children.length) list.append(el("li", {}, told ? "All of it was found." : "Nothing is known of it any more."));
    $("why-told").replaceChildren(list);
    $("why").showModal();
  }

  function show(told, ask) {
    $("main").classList.remove("waits");
    $("model").textContent = told.model;
    document.title = `Pagefold ${told.model}`;
    $("about").textContent = `Pagefold ${told.version}${told.is_whole ? "" : "; it stopped counting after a failure: see the server's log"}`;
    figures(told);
    tiers(told);
    found(told);
    gone(told);
    requests(told, ask);
    prefixes(told);
  }

  /** Draw once more: colours have changed. */
  function redraw() {
    draw.forget();
    for (const one of charts.values()) one.draw();
  }

  return { show, whatif, advice, why, redraw };
})();

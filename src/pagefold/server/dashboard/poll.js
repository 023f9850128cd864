"use strict";
/* Polls: asks the server every five seconds while somebody looks, with the key if one is needed. */
(() => {
  const $ = (id) => document.getElementById(id);
  const EVERY_MS = 5000;
  const SELDOM = 12; // of those: what changes slowly is asked once a minute
  const KEY = "pagefold-admin-key";
  let timer = null;
  let isPaused = false;
  let number = 0;
  let isAsking = false;

  const kept = (store, name) => { try { return window[store].getItem(name); } catch { return null; } };
  const keep = (store, name, value) => { try { window[store].setItem(name, value); } catch { /* then it is asked again */ } };
  const drop = (store, name) => { try { window[store].removeItem(name); } catch { /* it was never kept */ } };
  let key = null;

  function say(text, kind = "") {
    const state = $("state");
    if (state.textContent !== text) state.textContent = text; // a reader hears changes only
    state.className = `state ${kind}`;
  }

  async function ask(path) {
    const headers = key ? { Authorization: `Bearer ${key}` } : {};
    const answer = await fetch(path, { headers, cache: "no-store", credentials: "omit" });
    const body = await answer.json().catch(() => null);
    return { status: answer.status, body, message: body?.error?.message ?? `The server answers ${answer.status}.` };
  }

  function askForKey(message) {
    drop("sessionStorage", KEY);
    key = null;
    $("asks-key").hidden = false;
    $("key-why").textContent = message;
    $("key").focus();
    say("Waits for a key", "bad");
  }

  async function poll() {
    timer = null;
    if (document.hidden || isPaused) return;
    let isWanted = true;
    try {
      const { status, body, message } = await ask("/v1/dashboard");
      if (status === 200) {
        $("asks-key").hidden = true;
        say("Live", "live");
        panels.show(body, why);
        if (number % SELDOM === 0 && !isAsking) seldom(body.more); // a curve may take seconds: nobody waits for it
        number += 1;
      } else if (status === 401) {
        isWanted = false;
        askForKey(message);
      } else {
        isWanted = status !== 403;
        say(message, "bad");
      }
    } catch {
      say("The server does not answer. It is asked again.", "bad");
    }
    if (isWanted && timer === null && !document.hidden && !isPaused) timer = setTimeout(poll, EVERY_MS);
  }

  /** Ask for what changes slowly, where the server has it. */
  async function seldom(more) {
    isAsking = true;
    try {
      for (const [name, show] of [["advice", panels.advice], ["whatif", panels.whatif]]) {
        if (!more[name]) continue;
        const { status, body } = await ask(more[name]);
        show(status === 200 ? body : null);
      }
    } catch {
      // The next poll says that the server does not answer.
    } finally {
      isAsking = false;
    }
  }

  async function why(id) {
    try {
      const { status, body } = await ask(`/v1/explain/${encodeURIComponent(id)}`);
      panels.why(id, status === 200 ? body : null);
    } catch {
      say("The server does not answer. It is asked again.", "bad");
    }
  }

  function again() {
    clearTimeout(timer);
    timer = null;
    poll();
  }

  $("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    const given = $("key").value.trim();
    $("key").value = "";
    if (!/^[!-~]+$/.test(given)) { // no server has such a key, and no header takes some of them
      askForKey("That is no key: keys are letters, digits and signs of ASCII, without spaces.");
      return;
    }
    key = given;
    keep("sessionStorage", KEY, key);
    again();
  });
  $("pause").addEventListener("click", () => {
    isPaused = !isPaused;
    $("pause").setAttribute("aria-pressed", String(isPaused));
    if (isPaused) say("Paused");
    again();
  });
  document.addEventListener("visibilitychange", () => { if (!document.hidden) again(); });

  // Light and dark: as the system is, or as somebody has said.
  const themes = ["auto", "light", "dark"];
  function use(theme) {
    if (theme === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme;
    $("theme").querySelector("span").textContent = theme;
    keep("localStorage", "pagefold-theme", theme);
    panels.redraw();
  }
  $("theme").addEventListener("click", () => use(themes[(themes.indexOf(document.documentElement.dataset.theme ?? "auto") + 1) % 3]));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => panels.redraw());
  const theme = kept("localStorage", "pagefold-theme");
  if (themes.includes(theme) && theme !== "auto") use(theme);

  // The page is painted first: what is drawn in it would only hold that up.
  let hasBegun = false;
  function begin() {
    if (hasBegun) return;
    hasBegun = true;
    key = kept("sessionStorage", KEY);
    poll();
  }
  new PerformanceObserver((list) => {
    if (list.getEntriesByName("first-contentful-paint").length) begin();
  }).observe({ type: "paint", buffered: true });
  setTimeout(begin, 500); // where a browser tells no paints
})();

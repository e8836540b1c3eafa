/* Shows the page again every few seconds. Everything is drawn on the server: this script only
   replaces the parts that have changed. Without it the link "Refresh" does the same. */
"use strict";
(() => {
  const PREFIX = "dcl_admin.";
  const link = document.getElementById("dcl-refresh-link");
  const controls = document.getElementById("dcl-controls");
  if (!link || !controls) return;
  const pause = document.getElementById("dcl-pause");
  const interval = document.getElementById("dcl-interval");
  const state = document.getElementById("dcl-state");
  const announce = document.getElementById("dcl-announce");
  let timer = null;
  let busy = false;
  let ended = false;

  const stored = (name, fallback) => {
    try { return localStorage.getItem(PREFIX + name) ?? fallback; } catch { return fallback; }
  };
  const store = (name, value) => {
    try { localStorage.setItem(PREFIX + name, value); } catch { /* a private window */ }
  };
  const paused = () => pause.getAttribute("aria-pressed") === "true";
  const say = (text) => { if (state.textContent !== text) state.textContent = text; };

  /* A person who has ticked or typed something would lose it. */
  const touched = () => [...document.querySelectorAll("[data-live] input, [data-live] textarea")]
    .some((each) => each.type === "checkbox" ? each.checked : each.type === "text" && each.value);

  const waits = () => {
    if (ended) return "Signed out: updates have ended.";
    if (paused()) return "Updates are paused.";
    if (document.hidden) return "Updates wait until the tab is shown.";
    if (touched()) return "Updates wait while something is ticked or typed.";
    return "";
  };

  const withoutToken = (element) => {
    const copy = element.cloneNode(true);
    copy.querySelectorAll("[name=csrfmiddlewaretoken]").forEach((each) => each.remove());
    copy.querySelectorAll("details").forEach((each) => each.removeAttribute("open"));
    return copy.innerHTML;
  };

  const replace = (old, fresh) => {
    if (withoutToken(old) === withoutToken(fresh)) return;
    const open = [...old.querySelectorAll("details[open]")].map((each) => each.id);
    const focus = old.contains(document.activeElement) ? place(old, document.activeElement) : null;
    old.replaceChildren(...fresh.childNodes);
    for (const id of open) document.getElementById(id)?.setAttribute("open", "");
    if (focus !== null) (focusable(old)[focus] ?? old).focus();
  };
  const focusable = (element) =>
    [...element.querySelectorAll("a[href], button, input, select, textarea, summary, [tabindex]")];
  const place = (element, active) => focusable(element).indexOf(active);

  const refresh = async () => {
    const current = document.getElementById("dcl-refresh-link");
    const response = await fetch(current.href, { credentials: "same-origin" });
    const text = await response.text();
    const page = new DOMParser().parseFromString(text, "text/html");
    if (response.redirected || response.status === 403 || !page.getElementById("dcl-refresh-link")) {
      if (response.status >= 500) { say("The server could not answer; trying again."); return; }
      ended = true;
      say(waits());
      announce.textContent = waits();
      return;
    }
    if (waits()) return;
    const before = document.getElementById("dcl-summary").textContent;
    for (const fresh of page.querySelectorAll("[data-live]")) {
      const old = document.getElementById(fresh.id);
      if (old) replace(old, fresh);
    }
    const after = document.getElementById("dcl-summary").textContent;
    if (after !== before) announce.textContent = after;
    say("");
  };

  const turn = async () => {
    const why = waits();
    if (why) say(why);
    else if (!busy) {
      busy = true;
      try { await refresh(); } catch { say("The server could not be reached; trying again."); }
      busy = false;
    }
    plan();
  };
  const plan = () => {
    clearTimeout(timer);
    if (!ended) timer = setTimeout(turn, Number(interval.value) * 1000);
  };

  const show = (isPaused) => {
    pause.setAttribute("aria-pressed", String(isPaused));
    say(waits());
  };
  pause.addEventListener("click", () => {
    show(!paused());
    store("paused", String(paused()));
    if (!paused()) turn();
  });
  interval.addEventListener("change", () => { store("interval", interval.value); plan(); });
  document.addEventListener("visibilitychange", () => { if (!document.hidden && !paused()) turn(); });

  interval.value = stored("interval", "5");
  if (!interval.value) interval.value = "5";
  show(stored("paused", "false") === "true");
  controls.hidden = false;
  plan();
})();

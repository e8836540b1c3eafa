/* Shows the page again every five seconds. Everything is drawn on the server: this script only
   replaces the parts that have changed. Without it the link "Refresh" does the same. */
"use strict";
(() => {
  const EVERY = 5000;
  const pause = document.getElementById("dcl-pause");
  const announce = document.getElementById("dcl-announce");
  if (!pause || !announce) return;
  let ended = false;

  /* A person who has ticked something would lose it. */
  const touched = () => document.querySelector("[name=pk]:checked") !== null;
  const paused = () => pause.getAttribute("aria-pressed") === "true";
  const waits = () => ended || paused() || document.hidden || touched();

  const focusable = (element) =>
    [...element.querySelectorAll("a[href], button, input, summary, [tabindex]")];
  const bare = (element) => {
    const copy = element.cloneNode(true);
    copy.querySelectorAll("[name=csrfmiddlewaretoken]").forEach((each) => each.remove());
    return copy.innerHTML;
  };
  const replace = (old, fresh) => {
    if (bare(old) === bare(fresh)) return;
    const place = focusable(old).indexOf(document.activeElement);
    old.replaceChildren(...fresh.childNodes);
    if (place >= 0) (focusable(old)[place] ?? old).focus();
  };
  const say = (text) => { if (announce.textContent !== text) announce.textContent = text; };

  const refresh = async () => {
    const response = await fetch(location.href, { credentials: "same-origin" });
    if (response.status >= 500) { say("The server could not answer; trying again."); return; }
    const page = new DOMParser().parseFromString(await response.text(), "text/html");
    ended = response.redirected || !page.getElementById("dcl-summary");
    if (ended) { say("Signed out: updates have ended."); return; }
    if (waits()) return;
    const before = document.getElementById("dcl-summary").textContent;
    for (const fresh of page.querySelectorAll("[data-live]")) {
      const old = document.getElementById(fresh.id);
      if (old) replace(old, fresh);
    }
    const after = document.getElementById("dcl-summary").textContent;
    if (after !== before) say(after);
  };
  const turn = async () => {
    if (!waits()) {
      try { await refresh(); } catch { say("The server could not be reached; trying again."); }
    }
    if (!ended) setTimeout(turn, EVERY);
  };
  pause.addEventListener("click", () => pause.setAttribute("aria-pressed", String(!paused())));
  pause.hidden = false;
  setTimeout(turn, EVERY);
})();

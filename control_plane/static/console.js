// The console's behaviour: pages that renew themselves, forms that are calls of the admin API.
import { drawCharts } from "/console/static/charts.js";
import { listenToForms } from "/console/static/forms.js";
import { listenToPlayground } from "/console/static/playground.js";
import { listenToSignIn, signOut } from "/console/static/session.js";

const RENEW_MS = 3000;
const middle = document.getElementById("middle");
const live = document.querySelector("[data-live]");

// What a person has under the pointer or is writing must not change under their hands.
const isBusy = () =>
  document.hidden ||
  document.querySelector("dialog[open]") ||
  middle.querySelector("form:focus-within:not(.filter), details[open] form:focus-within") ||
  String(getSelection()) !== "";

function tell(state, text) {
  if (!live) return;
  live.dataset.live = state;
  const place = live.querySelector("[data-live-text]");
  if (place.textContent !== text) place.textContent = text;
}

if (window.htmx) {
  htmx.config.allowEval = false;
  setInterval(() => {
    if (isBusy()) return tell("held", "Held");
    htmx.trigger(middle, "tick");
  }, RENEW_MS);
  middle.addEventListener("htmx:afterSwap", () => tell("on", "Live"));
  middle.addEventListener("htmx:sendError", () => tell("away", "Control plane away"));
  middle.addEventListener("htmx:responseError", () => tell("away", "No answer"));
}

document.querySelector("[data-theme-switch]")?.addEventListener("click", () => {
  const root = document.documentElement;
  const isDark = root.dataset.theme
    ? root.dataset.theme === "dark"
    : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = isDark ? "light" : "dark";
  localStorage.setItem("theme", root.dataset.theme);
  document.dispatchEvent(new Event("theme"));
});

document.querySelector(".menu")?.addEventListener("click", (event) => {
  const isOpen = document.getElementById("navigation").classList.toggle("open");
  event.currentTarget.setAttribute("aria-expanded", String(isOpen));
});

document.querySelector("[data-sign-out]")?.addEventListener("click", signOut);
drawCharts();
listenToForms();
listenToPlayground();
listenToSignIn();

// The application: navigation by the address's fragment, theme, API key.

import { ApiError, get, key } from "./api.js";
import { h, replace } from "./dom.js";
import { onStatus, restart } from "./live.js";
import * as overview from "./views/overview.js";
import * as planner from "./views/planner.js";
import * as playground from "./views/playground.js";
import * as reports from "./views/reports.js";
import * as requests from "./views/requests.js";
import * as routing from "./views/routing.js";
import * as workers from "./views/workers.js";

const VIEWS = { overview, workers, routing, requests, playground, planner, reports };
const TITLES = {
  overview: "Overview", workers: "Workers", routing: "Routing", requests: "Requests", playground: "Playground", planner: "Planner", reports: "Reports",
};
const THEMES = ["auto", "light", "dark"];
const main = document.getElementById("main");
const session = { needsKey: false, mayRead: true, mayAct: false };
let leave = null;

function theme(value) {
  const dark = value === "dark" || (value === "auto" && matchMedia("(prefers-color-scheme: dark)").matches);
  document.documentElement.dataset.theme = dark ? "dark" : "light";
  const button = document.getElementById("theme");
  button.textContent = { auto: "Auto", light: "Light", dark: "Dark" }[value];
  button.setAttribute("aria-label", `Color theme: ${value}. Activate to change.`);
}

function chosenTheme() {
  const found = localStorage.getItem("dynamo-console-theme");
  return THEMES.includes(found) ? found : "auto";
}

document.getElementById("theme").addEventListener("click", () => {
  const next = THEMES[(THEMES.indexOf(chosenTheme()) + 1) % THEMES.length];
  localStorage.setItem("dynamo-console-theme", next);
  theme(next);
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => theme(chosenTheme()));
theme(chosenTheme());

// Scrolls the navigation to a link. `scrollIntoView` would also move the place from which the Tab key starts, past the link to the content.
function reveal(link) {
  const nav = link.parentElement.getBoundingClientRect(), own = link.getBoundingClientRect();
  link.parentElement.scrollLeft += Math.min(own.left - nav.left, Math.max(own.right - nav.right, 0));
}

// Views: each module has `show(container, context, ...path)`, which returns a function that ends it.

function go(isFirst = false) {
  const [name, ...path] = location.hash.replace(/^#\/?/, "").split("/").map(decodeURIComponent);
  const view = VIEWS[name] ? name : "overview";
  leave?.();
  leave = null;
  document.title = `${TITLES[view]} · Dynamo console`;
  for (const link of document.querySelectorAll("#nav a")) {
    if (link.dataset.view === view) {
      link.setAttribute("aria-current", "page");
      reveal(link);
    } else link.removeAttribute("aria-current");
  }
  replace(main);
  if (!session.mayRead && view !== "playground") {
    replace(main, h("div", { class: "card" }, h("div", { class: "empty" }, h("strong", {}, "An admin key is needed"),
      h("span", {}, "This view shows the requests of all callers."), h("button", { type: "button", class: "primary", onclick: askKey }, "Enter key"))));
  } else leave = VIEWS[view].show(main, session, ...path);
  if (!isFirst) {
    main.focus({ preventScroll: true });
    scrollTo(0, 0);
  }
}

replace(document.getElementById("nav"), Object.entries(TITLES).map(([name, title]) => h("a", { href: `#/${name}`, "data-view": name }, title)));
addEventListener("hashchange", () => { if (location.hash !== "#main") go(); });
document.querySelector(".skip").addEventListener("click", (event) => { event.preventDefault(); main.focus(); });

onStatus((kind, text) => {
  document.getElementById("status").dataset.state = kind;
  document.getElementById("status-text").textContent = text;
});

// The API key.

const dialog = document.getElementById("key-dialog");
const input = document.getElementById("key-input");
const problem = document.getElementById("key-problem");

function askKey() {
  input.value = key.get();
  problem.textContent = "";
  dialog.showModal();
  input.focus();
}

async function saveKey() {
  key.set(input.value.trim());
  try {
    await readSession();
  } catch (error) {
    key.set("");
    problem.textContent = error.message;
    return;
  }
  dialog.close();
  restart();
  go();
}

document.getElementById("key-button").addEventListener("click", askKey);
document.getElementById("key-cancel").addEventListener("click", () => dialog.close());
document.getElementById("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  saveKey();
});

async function readSession() {
  const found = await get("/console/api/session");
  session.mayRead = found.may_read;
  session.mayAct = found.may_act;
}

async function start() {
  try {
    const meta = await get("/console/api/meta");
    session.needsKey = meta.needs_key;
    document.getElementById("version").textContent = `dynamo ${meta.version}`;
    document.getElementById("key-button").hidden = !meta.needs_key;
    session.mayRead = !meta.needs_key;
    if (!meta.needs_key || key.get()) await readSession();
  } catch (error) {
    if (error instanceof ApiError && error.status === 401) key.set("");
  }
  go(true);
  if (session.needsKey && !key.get()) askKey();
}

start();

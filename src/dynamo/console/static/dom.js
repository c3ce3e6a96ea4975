// Elements: short constructors for HTML and SVG. Text is always a text node, so nothing that a server sends is markup.

const SVG = "http://www.w3.org/2000/svg";

export function h(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

export function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "value") node.value = value;
    else if (name === "checked" || name === "selected" || name === "disabled") node[name] = Boolean(value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat(3).filter((one) => one !== null && one !== undefined && one !== false));
  return node;
}

export function replace(node, ...children) {
  node.replaceChildren(...children.flat(3).filter((one) => one !== null && one !== undefined && one !== false));
  return node;
}

export function card(title, aside, ...body) {
  const head = h("div", { class: "head" }, h("h2", {}, title), aside ? h("span", { class: "muted" }, aside) : null);
  return h("section", { class: "card", "aria-label": title }, head, ...body);
}

export function badge(text, kind = "") {
  return h("span", { class: `badge ${kind}` }, text);
}

export function meter(share, label, limits = [0.8, 0.95]) {
  const kind = share >= limits[1] ? "bad" : share >= limits[0] ? "warn" : "";
  const bar = svg("svg", { viewBox: "0 0 100 8", preserveAspectRatio: "none", "aria-hidden": "true" },
    svg("rect", { class: "track", width: 100, height: 8, rx: 4 }),
    svg("rect", { class: `fill ${kind}`, width: Math.min(100, Math.max(share > 0 ? 2 : 0, share * 100)), height: 8, rx: 4 }));
  return h("span", { class: "meter" }, bar, h("span", {}, label));
}

export function empty(title, text, ...more) {
  return h("div", { class: "empty" }, h("strong", {}, title), text ? h("span", {}, text) : null, ...more);
}

// A table whose rows keep the focus of the keyboard when they are drawn again.
export function table(columns, rows, options = {}) {
  const head = h("tr", {}, columns.map((one) => h("th", { scope: "col", class: one.num ? "num" : null }, one.title)));
  const body = rows.map((row) => h("tr", options.attributes ? options.attributes(row) : {},
    columns.map((one) => h("td", { class: [one.num ? "num" : "", one.wrap ? "wrap" : ""].join(" ").trim() || null }, one.cell(row)))));
  return h("div", { class: "table", role: "region", "aria-label": options.label, tabindex: options.label ? "0" : null },
    h("table", {}, options.label ? h("caption", { class: "visually-hidden" }, options.label) : null, h("thead", {}, head), h("tbody", {}, body)));
}

// Runs `draw` and restores the focus to the element with the same `data-focus` name.
export function keepFocus(container, draw) {
  const active = document.activeElement;
  const name = active && container.contains(active) ? active.dataset.focus : null;
  const scrolls = [...container.querySelectorAll(".table")].map((one) => one.scrollLeft);
  draw();
  if (name) container.querySelector(`[data-focus="${CSS.escape(name)}"]`)?.focus({ preventScroll: true });
  container.querySelectorAll(".table").forEach((one, place) => { if (scrolls[place]) one.scrollLeft = scrolls[place]; });
}

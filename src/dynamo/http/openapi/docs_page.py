"""Docs page: `GET /docs` displays the OpenAPI document; the page loads nothing but that document."""

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>API of this frontend</title>
<style>
:root { color-scheme: light dark; font-family: system-ui, sans-serif; line-height: 1.45 }
body { max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
details { border: 1px solid #8884; border-radius: 6px; margin: .4rem 0; padding: .4rem .8rem }
summary { cursor: pointer; font-family: ui-monospace, monospace }
.method { display: inline-block; width: 4rem; font-weight: 700; text-transform: uppercase }
.about { font-family: system-ui, sans-serif; opacity: .75; margin-left: 1rem }
pre, textarea { background: #8881; border-radius: 6px; padding: .6rem; overflow: auto; max-height: 26rem; font-size: .85rem }
textarea, input { width: 100%; box-sizing: border-box; font-family: ui-monospace, monospace; border: 1px solid #8886 }
input { padding: .4rem; border-radius: 6px } button { margin: .5rem 0; padding: .3rem 1rem }
</style>
</head>
<body>
<h1 id="title">API</h1>
<p><a href="openapi.json">openapi.json</a></p>
<p><label>API key, where one is needed: <input id="key" type="password" autocomplete="off"></label></p>
<main id="routes">Loading …</main>
<h2>Types</h2>
<div id="types"></div>
<script>
"use strict";
const make = (tag, text, parent, kind) => {
  const node = document.createElement(tag);
  if (text !== null) node.textContent = text;
  if (kind) node.className = kind;
  parent.append(node);
  return node;
};
const pretty = value => JSON.stringify(value, null, 2);
function sample(schema, types, depth = 0) {
  if (!schema || depth > 4) return null;
  if (schema.$ref) return sample(types[schema.$ref.split("/").pop()], types, depth + 1);
  if ("default" in schema) return schema.default;
  if (schema.enum) return schema.enum[0];
  if (schema.anyOf) return sample(schema.anyOf.find(one => one.type !== "null"), types, depth + 1);
  if (schema.type === "object") {
    const needed = schema.required || [];
    return Object.fromEntries(needed.map(name => [name, sample((schema.properties || {})[name], types, depth + 1)]));
  }
  return { array: [], string: "", integer: 1, number: 1, boolean: false }[schema.type] ?? null;
}
async function send(method, path, text, shown) {
  const key = document.getElementById("key").value;
  const headers = text === null ? {} : { "content-type": "application/json" };
  if (key) headers.authorization = "Bearer " + key;
  shown.textContent = "…";
  try {
    const response = await fetch(path, { method, headers, body: text });
    shown.textContent = response.status + " " + response.statusText + "\\n\\n";
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    for (let part = await reader.read(); !part.done; part = await reader.read()) shown.textContent += part.value;
  } catch (error) { shown.textContent = String(error); }
}
function draw(method, path, operation, types, parent) {
  const box = make("details", null, parent), head = make("summary", null, box);
  make("span", method, head, "method"); make("span", path, head); make("span", operation.summary, head, "about");
  const inputs = (operation.parameters || []).map(one => {
    const input = make("input", null, make("label", one.name, box));
    return [one, input];
  });
  let body = null;
  const content = operation.requestBody && operation.requestBody.content["application/json"];
  if (content) {
    make("p", "Request", box);
    make("pre", pretty(content.schema), box);
    body = make("textarea", pretty(sample(content.schema, types)), box);
    body.rows = 8;
  }
  make("p", "Responses", box);
  for (const [status, response] of Object.entries(operation.responses)) {
    const kinds = Object.entries(response.content || {}).map(([kind, one]) => kind + " " + JSON.stringify(one.schema));
    make("pre", [status + " " + response.description, ...kinds].join("\\n"), box);
  }
  const button = make("button", "Send", box), shown = make("pre", "", box);
  button.onclick = () => {
    let target = path;
    const query = new URLSearchParams();
    for (const [one, input] of inputs) {
      if (one.in === "path") target = target.replace("{" + one.name + "}", encodeURI(input.value));
      else if (input.value) query.set(one.name, input.value);
    }
    send(method.toUpperCase(), target + (query.size ? "?" + query : ""), body && body.value, shown);
  };
}
fetch("openapi.json").then(response => response.json()).then(document_ => {
  const types = document_.components.schemas, routes = document.getElementById("routes");
  document.getElementById("title").textContent = document_.info.title + " " + document_.info.version;
  routes.textContent = "";
  for (const [path, methods] of Object.entries(document_.paths))
    for (const [method, operation] of Object.entries(methods)) draw(method, path, operation, types, routes);
  for (const [name, schema] of Object.entries(types)) {
    const box = make("details", null, document.getElementById("types"));
    make("summary", name, box);
    make("pre", pretty(schema), box);
  }
}).catch(error => { document.getElementById("routes").textContent = String(error); });
</script>
</body>
</html>
"""

HEADERS = {
    "content-security-policy": (
        "default-src 'none'; connect-src 'self'; script-src 'unsafe-inline'; style-src 'unsafe-inline'"
    ),
    "x-content-type-options": "nosniff",
}
"""The page loads nothing from other origins; the content security policy makes browsers enforce that."""

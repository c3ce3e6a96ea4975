// Playground: a conversation with a served model: streaming, tools, JSON schema, parameters, and the same request as curl and Python.

import { ApiError, events, get, open } from "../api.js";
import { badge, card, h, replace } from "../dom.js";
import { report } from "../live.js";
import { ms, number, percent, whole } from "../format.js";

const TOOL_EXAMPLE = JSON.stringify([{ type: "function", function: { name: "get_weather", description: "Current weather of a city",
  parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] } } }], null, 2);
const SCHEMA_EXAMPLE = JSON.stringify({ type: "object", properties: { answer: { type: "string" }, confidence: { type: "number" } }, required: ["answer"] }, null, 2);
const PARAMETERS = [
  ["temperature", "Temperature", { min: 0, max: 2, step: 0.1 }], ["top_p", "Top p", { min: 0, max: 1, step: 0.05 }],
  ["max_tokens", "Maximum tokens", { min: 1, step: 1 }], ["seed", "Seed", { step: 1 }],
  ["frequency_penalty", "Frequency penalty", { min: -2, max: 2, step: 0.1 }], ["presence_penalty", "Presence penalty", { min: -2, max: 2, step: 0.1 }],
];

export function show(main, session) {
  const messages = [];
  let controller = null;
  const model = h("select", { id: "pg-model" });
  const system = h("textarea", { id: "pg-system", rows: 2, placeholder: "Optional", oninput: () => drawCode() });
  const inputs = Object.fromEntries(PARAMETERS.map(([name, , limits]) => [name, h("input", { id: `pg-${name}`, type: "number", inputmode: "decimal", placeholder: "default", oninput: () => drawCode(), ...limits })]));
  inputs.max_tokens.value = "256";
  const stop = h("input", { id: "pg-stop", placeholder: "separated by |", oninput: () => drawCode() });
  const stream = h("input", { type: "checkbox", id: "pg-stream", checked: true, onchange: () => drawCode() });
  const tools = h("textarea", { id: "pg-tools", class: "mono", rows: 5, spellcheck: "false", placeholder: "[]", oninput: () => drawCode() });
  const schema = h("textarea", { id: "pg-schema", class: "mono", rows: 5, spellcheck: "false", placeholder: "{}", oninput: () => drawCode() });
  const transcript = h("div", { class: "transcript", role: "log", "aria-label": "Conversation", tabindex: "0" });
  const prompt = h("textarea", { id: "pg-prompt", rows: 3, placeholder: "Message. Ctrl+Enter sends it.", oninput: () => drawCode() });
  const send = h("button", { type: "button", class: "primary", onclick: () => (controller ? controller.abort() : submit()) }, "Send");
  const clear = h("button", { type: "button", onclick: () => { messages.length = 0; replace(transcript); welcome(); drawCode(); } }, "Clear");
  const problem = h("p", { class: "problem", role: "alert" });
  const stats = h("div", { class: "row stats", role: "status" });
  const code = h("pre", { class: "code", tabindex: "0", "aria-label": "The same request as code" });
  let language = "curl";
  const languages = h("div", { class: "segmented", role: "group", "aria-label": "Language" }, ["curl", "Python"].map((one) => h("button", {
    type: "button", "aria-pressed": String(one === language), onclick: (event) => {
      language = one;
      for (const node of languages.children) node.setAttribute("aria-pressed", String(node === event.currentTarget));
      drawCode();
    },
  }, one)));
  const copy = h("button", { type: "button", class: "small", onclick: async () => {
    await navigator.clipboard?.writeText(code.textContent);
    copy.textContent = "Copied";
    setTimeout(() => { copy.textContent = "Copy"; }, 1500);
  } }, "Copy");
  prompt.addEventListener("keydown", (event) => { if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) { event.preventDefault(); submit(); } });

  const field = (id, text, node) => h("div", { class: "field" }, h("label", { for: id }, text), node);
  const example = (node, text) => h("button", { type: "button", class: "small", onclick: () => { node.value = text; drawCode(); } }, "Example");
  replace(main, h("div", { class: "row between" }, h("h1", {}, "Playground"), stats), h("div", { class: "grid split" },
    h("div", { class: "stack" },
      card("Request", null, h("div", { class: "body stack" }, field("pg-model", "Model", model), field("pg-system", "System prompt", system),
        h("div", { class: "pairs" }, PARAMETERS.map(([name, text]) => field(`pg-${name}`, text, inputs[name]))), field("pg-stop", "Stop sequences", stop),
        h("div", { class: "row" }, stream, h("label", { for: "pg-stream" }, "Stream the response")))),
      card("Tools and structured output", null, h("div", { class: "body stack" },
        h("details", {}, h("summary", {}, "Tools"), h("div", { class: "stack inner" }, h("label", { for: "pg-tools" }, "JSON list of tools"), tools, example(tools, TOOL_EXAMPLE))),
        h("details", {}, h("summary", {}, "JSON schema"), h("div", { class: "stack inner" }, h("label", { for: "pg-schema" }, "The response must match this schema"), schema, example(schema, SCHEMA_EXAMPLE)))))),
    h("div", { class: "stack" },
      h("section", { class: "card chat", "aria-label": "Chat" }, transcript, h("div", { class: "compose" }, h("label", { class: "visually-hidden", for: "pg-prompt" }, "Message"), prompt, problem,
        h("div", { class: "row between" }, h("span", { class: "muted" }, "Ctrl+Enter sends"), h("div", { class: "row" }, clear, send)))),
      h("section", { class: "card", "aria-label": "Code" }, h("div", { class: "head" }, h("h2", {}, "Code"), h("div", { class: "row" }, languages, copy)), h("div", { class: "body" }, code)))));
  model.addEventListener("change", drawCode);

  function welcome() {
    if (!messages.length) replace(transcript, h("p", { class: "muted hint" }, "Write a message to the model. The answer, its timing and its worker appear here."));
  }

  function json(node, name) {
    if (!node.value.trim()) return undefined;
    try {
      return JSON.parse(node.value);
    } catch (error) {
      throw new Error(`${name}: ${error.message}`);
    }
  }

  function body(pending) {
    const found = { model: model.value, messages: [] };
    if (system.value.trim()) found.messages.push({ role: "system", content: system.value });
    found.messages.push(...messages);
    if (pending) found.messages.push({ role: "user", content: pending });
    for (const [name] of PARAMETERS) if (inputs[name].value !== "") found[name] = Number(inputs[name].value);
    if (stop.value) found.stop = stop.value.split("|");
    const listed = json(tools, "Tools"), wanted = json(schema, "JSON schema");
    if (listed !== undefined) found.tools = listed;
    if (wanted !== undefined) found.response_format = { type: "json_schema", json_schema: { name: "answer", schema: wanted } };
    if (stream.checked) Object.assign(found, { stream: true, stream_options: { include_usage: true } });
    return found;
  }

  function drawCode() {
    let request;
    try {
      request = body(prompt.value.trim() || (messages.length ? "" : "Hello"));
    } catch (error) {
      code.textContent = error.message;
      return;
    }
    code.textContent = language === "curl" ? curl(request, session) : python(request, session);
  }

  async function submit() {
    const text = prompt.value.trim();
    if (!text || controller) return;
    problem.textContent = "";
    let request;
    try {
      request = body(text);
    } catch (error) {
      problem.textContent = error.message;
      return;
    }
    if (!messages.length) replace(transcript);
    messages.push({ role: "user", content: text });
    prompt.value = "";
    transcript.append(bubble("user", "You", h("p", { class: "text" }, text)));
    const answer = { thoughts: "", text: "", calls: [], finish: "" };
    const content = h("div", { class: "answer" }, h("p", { class: "text pending" }, "…"));
    transcript.append(bubble("assistant", request.model, content));
    controller = new AbortController();
    send.textContent = "Stop";
    const began = performance.now();
    const timing = { first: null, id: "", usage: null };
    try {
      const response = await open("/v1/chat/completions", { method: "POST", body: JSON.stringify(request), headers: { "content-type": "application/json" }, signal: controller.signal });
      if (request.stream) await readStream(response, answer, timing, content, began);
      else readWhole(await response.json(), answer, timing, began);
    } catch (error) {
      if (error.name !== "AbortError") problem.textContent = error instanceof ApiError ? `${error.status || ""} ${error.message}`.trim() : String(error);
      else answer.finish = "stopped";
    }
    controller = null;
    send.textContent = "Send";
    draw(content, answer);
    if (answer.text || answer.calls.length) messages.push({ role: "assistant", content: answer.text || null, ...(answer.calls.length ? { tool_calls: answer.calls } : {}) });
    drawStats(answer, timing, performance.now() - began);
    drawCode();
    prompt.focus();
  }

  async function readStream(response, answer, timing, content, began) {
    let isDue = false;
    for await (const event of events(response)) {
      if (event.data === "[DONE]") break;
      const chunk = JSON.parse(event.data);
      if (!chunk.choices) throw new ApiError(chunk.error?.code || 0, chunk.error?.message || chunk.message || event.data);
      timing.id = chunk.id || timing.id;
      timing.usage = chunk.usage || timing.usage;
      for (const choice of chunk.choices) {
        const delta = choice.delta || {};
        if (timing.first === null && (delta.content || delta.reasoning_content || delta.tool_calls)) timing.first = performance.now() - began;
        answer.text += delta.content || "";
        answer.thoughts += delta.reasoning_content || delta.reasoning || "";
        for (const call of delta.tool_calls || []) {
          const known = (answer.calls[call.index] ??= { id: call.id, type: "function", function: { name: "", arguments: "" } });
          known.function.name += call.function?.name || "";
          known.function.arguments += call.function?.arguments || "";
        }
        answer.finish = choice.finish_reason || answer.finish;
      }
      if (!isDue) {
        isDue = true;
        requestAnimationFrame(() => { isDue = false; draw(content, answer); });
      }
    }
  }

  function readWhole(whole_, answer, timing, began) {
    const [choice] = whole_.choices;
    answer.text = choice.message.content || "";
    answer.thoughts = choice.message.reasoning_content || "";
    answer.calls = choice.message.tool_calls || [];
    answer.finish = choice.finish_reason;
    Object.assign(timing, { id: whole_.id, usage: whole_.usage, first: performance.now() - began });
  }

  function draw(content, answer) {
    const isAtEnd = transcript.scrollHeight - transcript.scrollTop - transcript.clientHeight < 40;
    replace(content,
      answer.thoughts ? h("details", {}, h("summary", { class: "muted" }, "Reasoning"), h("p", { class: "text muted" }, answer.thoughts)) : null,
      answer.text ? h("p", { class: "text" }, answer.text) : answer.calls.length || answer.thoughts ? null : h("p", { class: "text muted" }, answer.finish ? "(empty)" : "…"),
      answer.calls.map((call) => h("div", { class: "call" }, badge(`calls ${call.function.name}`, "accent"), h("pre", {}, call.function.arguments))));
    if (isAtEnd) transcript.scrollTop = transcript.scrollHeight;
  }

  function drawStats(answer, timing, total) {
    const output = timing.usage?.completion_tokens, cached = timing.usage?.prompt_tokens_details?.cached_tokens;
    const seconds = (total - (timing.first ?? 0)) / 1000;
    replace(stats, answer.finish ? badge(answer.finish, answer.finish === "stop" || answer.finish === "tool_calls" ? "good" : "warn") : null,
      h("span", {}, "first token ", h("b", {}, ms(timing.first))), h("span", {}, "total ", h("b", {}, ms(total))),
      output ? h("span", {}, h("b", {}, whole(output)), " tokens, ", h("b", {}, number(output > 1 && seconds > 0 ? (output - 1) / seconds : null)), " tok/s") : null,
      cached ? h("span", {}, "cached ", h("b", {}, percent(cached / timing.usage.prompt_tokens))) : null,
      timing.id && session.mayRead ? h("a", { href: `#/requests/${timing.id.slice(-36)}` }, "Show this request") : null);
  }

  get("/v1/models").then((found) => {
    replace(model, found.data.map((one) => h("option", { value: one.id }, one.id)));
    if (!found.data.length) problem.textContent = "No model is served yet.";
    report("live", "Ready");
    drawCode();
  }, (error) => {
    report("lost", "Disconnected");
    problem.textContent = error.message;
  });
  welcome();
  return () => controller?.abort();
}

function bubble(kind, name, content) {
  return h("article", { class: `bubble ${kind}` }, h("h3", {}, name), content);
}

function quote(text) {
  return `'${text.replaceAll("'", `'\\''`)}'`;
}

function curl(request, session) {
  const key = session.needsKey ? ` \\\n  -H "authorization: Bearer $DYN_API_KEY"` : "";
  const flag = request.stream ? " -N" : "";
  return `curl${flag} ${location.origin}/v1/chat/completions \\\n  -H 'content-type: application/json'${key} \\\n  -d ${quote(JSON.stringify(request, null, 2))}`;
}

function literal(value, indent) {
  const pad = " ".repeat(indent + 4), end = " ".repeat(indent);
  if (value === null || value === undefined) return "None";
  if (value === true || value === false) return value ? "True" : "False";
  if (Array.isArray(value)) return value.length ? `[\n${value.map((one) => pad + literal(one, indent + 4)).join(",\n")},\n${end}]` : "[]";
  if (typeof value === "object") {
    const parts = Object.entries(value).map(([name, one]) => `${pad}${JSON.stringify(name)}: ${literal(one, indent + 4)}`);
    return parts.length ? `{\n${parts.join(",\n")},\n${end}}` : "{}";
  }
  return JSON.stringify(value);
}

function python(request, session) {
  const parts = Object.entries(request).map(([name, value]) => `    ${name}=${literal(value, 4)},`);
  const key = session.needsKey ? `os.environ["DYN_API_KEY"]` : `"none"`;
  const head = `${session.needsKey ? "import os\n\n" : ""}from openai import OpenAI\n\nclient = OpenAI(base_url="${location.origin}/v1", api_key=${key})\n`;
  const tail = request.stream
    ? `for chunk in response:\n    if chunk.choices:\n        print(chunk.choices[0].delta.content or "", end="", flush=True)\n`
    : "print(response.choices[0].message)\n";
  return `${head}response = client.chat.completions.create(\n${parts.join("\n")}\n)\n${tail}`;
}

// Overview: what the frontend serves, how fast, and how loaded it is; live.

import { LineChart, sparkline } from "../charts.js";
import { badge, card, empty, h, keepFocus, meter, replace, table } from "../dom.js";
import { ms, number, percent, whole } from "../format.js";
import { state, subscribe } from "../live.js";

const WINDOWS = { "1 min": 60, "5 min": 300, "15 min": 900 };
const SPARK_S = 60;

export function show(main, session) {
  let model = "", seconds = 300;
  const kpis = h("div", { class: "grid kpis" });
  const models = h("div");
  const notice = h("div");
  const select = h("select", { "aria-label": "Model", onchange: (event) => { model = event.target.value; draw(); } });
  const range = h("div", { class: "segmented", role: "group", "aria-label": "Time range" },
    Object.entries(WINDOWS).map(([text, value]) => h("button", {
      type: "button", "aria-pressed": String(value === seconds), onclick: (event) => {
        seconds = value;
        for (const one of range.children) one.setAttribute("aria-pressed", String(one === event.currentTarget));
        draw();
      },
    }, text)));
  const point = (sample) => (model ? sample.models[model] : sample.total) || null;
  const of = (read) => (sample) => { const found = point(sample); return found ? read(found) : null; };
  const charts = [
    new LineChart("Requests per second", [
      { label: "completed", kind: "s1", area: true, value: of((p) => p.requests - p.failures) }, { label: "failed", kind: "bad", value: of((p) => p.failures) },
    ], { format: number }),
    new LineChart("Tokens per second", [
      { label: "output", kind: "s1", area: true, value: of((p) => p.output_tokens) }, { label: "input", kind: "s2", value: of((p) => p.input_tokens) },
      { label: "cached", kind: "s5", value: of((p) => p.cached_tokens) },
    ], { format: number }),
    new LineChart("Time to first token", [
      { label: "p50", kind: "s1", value: of((p) => p.ttft.p50) }, { label: "p95", kind: "s3", value: of((p) => p.ttft.p95) },
      { label: "p99", kind: "s4", value: of((p) => p.ttft.p99) },
    ], { format: ms }),
    new LineChart("Inter-token latency", [
      { label: "p50", kind: "s1", value: of((p) => p.itl.p50) }, { label: "p95", kind: "s3", value: of((p) => p.itl.p95) },
      { label: "p99", kind: "s4", value: of((p) => p.itl.p99) },
    ], { format: ms }),
    new LineChart("Requests in flight", [
      { label: "in flight", kind: "s2", area: true, value: of((p) => p.in_flight) }, { label: "without a first token", kind: "s3", value: of((p) => p.queued) },
      { label: "router queue", kind: "s6", value: (sample) => sample.router_waiting },
    ], { format: number }),
    new LineChart("KV blocks in use", [{ label: "all workers", kind: "s5", area: true, value: (sample) => sample.kv_usage }], { format: percent, least: 0.1 }),
  ];
  replace(main, h("div", { class: "row between" }, h("h1", {}, "Overview"), h("div", { class: "row" }, h("div", { class: "pick" }, select), range)),
    notice, kpis, h("div", { class: "grid charts" }, charts.map((one) => one.node)), models);

  function drawKpis(samples) {
    const now = samples.at(-1);
    const recent = samples.filter((one) => now && one.at >= now.at - SPARK_S);
    const p = now ? point(now) : null;
    const serving = state.workers.filter((one) => one.state === "serving" && one.models.length && (!model || one.models.includes(model)));
    const others = state.workers.length - serving.length;
    const tile = (title, value, detail, read, kind) => h("div", { class: "card kpi" }, h("span", { class: "muted" }, title), h("strong", {}, value),
      h("span", { class: "detail muted" }, detail), read ? sparkline(recent.map(read), kind) : null);
    replace(kpis,
      tile("Requests", p ? `${number(p.requests)}/s` : "–", p && p.failures ? `${number(p.failures)}/s failed` : "none failed", of((q) => q.requests), "s1"),
      tile("Output", p ? `${number(p.output_tokens)} tok/s` : "–", p ? `${number(p.input_tokens)} tok/s input` : "", of((q) => q.output_tokens), "s1"),
      tile("First token p95", p ? ms(p.ttft.p95) : "–", p ? `p50 ${ms(p.ttft.p50)}` : "", of((q) => q.ttft.p95), "s3"),
      tile("Between tokens p95", p ? ms(p.itl.p95) : "–", p ? `p50 ${ms(p.itl.p50)}` : "", of((q) => q.itl.p95), "s3"),
      tile("In flight", p ? whole(p.in_flight) : "–", p ? `${whole(p.queued)} without a first token` : "", of((q) => q.in_flight), "s2"),
      tile("Prompt tokens cached", p && p.input_tokens ? percent(Math.min(1, p.cached_tokens / p.input_tokens)) : "–", "of prompts that ended",
        of((q) => (q.input_tokens ? Math.min(1, q.cached_tokens / q.input_tokens) : null)), "s5"),
      tile("Workers", String(serving.length), others > 0 && !model ? `${others} not serving` : "serving", null),
      tile("KV blocks in use", now ? percent(now.kv_usage) : "–", "all workers", (sample) => sample.kv_usage, "s5"));
  }

  function drawModels(samples) {
    const now = samples.at(-1);
    const rows = state.models;
    const columns = [
      { title: "Model", cell: (one) => h("strong", {}, one.name) },
      { title: "State", cell: (one) => badge(one.is_ready ? "ready" : "not ready", one.is_ready ? "good" : "bad") },
      { title: "Workers", cell: (one) => one.sets.map((set) => `${set.workers} ${set.role}`).join(" + ") },
      { title: "Router", cell: (one) => [...new Set(one.sets.map((set) => set.router_mode))].join(", ") },
      { title: "Requests/s", num: true, cell: (one) => number(now?.models[one.name]?.requests ?? 0) },
      { title: "Output tok/s", num: true, cell: (one) => number(now?.models[one.name]?.output_tokens ?? 0) },
      { title: "TTFT p95", num: true, cell: (one) => ms(now?.models[one.name]?.ttft.p95) },
      { title: "ITL p95", num: true, cell: (one) => ms(now?.models[one.name]?.itl.p95) },
      { title: "In flight", num: true, cell: (one) => whole(now?.models[one.name]?.in_flight ?? 0) },
      { title: "KV in use", cell: (one) => usage(one.name) },
      { title: "Block size", num: true, cell: (one) => one.block_size || "–" },
    ];
    keepFocus(models, () => replace(models, card("Models", `${rows.length} served`,
      rows.length ? table(columns, rows, { label: "Models" }) : empty("No model is served yet", "Start a worker; it appears here when it has registered."))));
  }

  function usage(name) {
    let used = 0, total = 0;
    for (const worker of state.workers.filter((one) => one.models.includes(name))) {
      for (const rank of worker.ranks) if (rank.kv_total && rank.kv_used !== null) { used += rank.kv_used; total += rank.kv_total; }
    }
    return total ? meter(used / total, percent(used / total)) : "–";
  }

  function drawNotice() {
    const absent = state.models.filter((one) => !one.is_ready).map((one) => one.name);
    const guessing = state.models.flatMap((one) => one.sets.filter((set) => set.is_guessing && set.role !== "decode").map(() => one.name));
    replace(notice,
      state.overview?.is_draining ? h("p", { class: "notice warn" }, "This frontend is draining: it refuses new requests.") : null,
      absent.length ? h("p", { class: "notice bad" }, `Not ready: ${absent.join(", ")}. `, h("a", { href: "#/workers" }, "Show workers")) : null,
      guessing.length ? h("p", { class: "notice warn" }, `The router predicts cached blocks of ${guessing.join(", ")}: its workers publish no KV events.`) : null);
  }

  function draw(name = "overview") {
    const samples = state.samples, now = samples.at(-1);
    if (name !== "sample") {
      const names = state.models.map((one) => one.name);
      if (model && !names.includes(model)) model = "";
      if (select.options.length !== names.length + 1) {
        replace(select, h("option", { value: "" }, "All models"), names.map((one) => h("option", { value: one, selected: one === model }, one)));
      }
      drawNotice();
    }
    drawKpis(samples);
    const shown = now ? samples.filter((one) => one.at >= now.at - seconds) : [];
    for (const chart of charts) chart.update(shown);
    drawModels(samples);
  }
  draw();
  return subscribe(draw);
}

// Planner: decisions over time, workers against demand, and how often the objectives were met.

import { get } from "../api.js";
import { LineChart } from "../charts.js";
import { badge, card, empty, h, keepFocus, replace, table } from "../dom.js";
import { clock, ms, number, percent } from "../format.js";
import { repeat } from "./requests.js";

const OUTCOMES = { accepted: "good", held: "warn", failed: "bad", advisory: "accent" };

export function show(main) {
  const box = h("div", { class: "stack" });
  const panels = new Map();
  replace(main, h("h1", {}, "Planner"), box);
  const poll = repeat(async () => {
    let planners = [];
    try {
      planners = (await get("/console/api/planners")).planners;
    } catch (error) {
      panels.clear();
      replace(box, h("div", { class: "card" }, empty("The planners cannot be read", error.message)));
      return false;
    }
    if (!planners.length) {
      panels.clear();
      replace(box, h("div", { class: "card" },
        empty("No planner is registered", "A planner changes the number of workers to meet latency objectives.", h("code", {}, "dynamo serve --planner --max-workers 4"))));
      return true;
    }
    if (planners.map((one) => one.instance_id).join() !== [...panels.keys()].join()) {
      panels.clear();
      for (const one of planners) panels.set(one.instance_id, panel());
      replace(box, [...panels.values()].map((one) => one.node));
    }
    for (const one of planners) panels.get(one.instance_id).update(one);
    return true;
  }, 2000);
  return poll.stop;
}

function panel() {
  const head = h("div", { class: "stack" });
  const rate = (one) => (one.traffic?.duration_s ? one.traffic.num_req / one.traffic.duration_s : null);
  let objectives = {};
  const replicas = new LineChart("Workers", [
    { label: "decode", kind: "s1", step: true, value: (one) => one.counts?.ready_num_decode ?? null },
    { label: "prefill", optional: true, kind: "s2", step: true, value: (one) => one.counts?.ready_num_prefill ?? null },
    { label: "wanted decode", kind: "s1", dashed: true, step: true, value: (one) => one.wanted_decode },
    { label: "wanted prefill", optional: true, kind: "s2", dashed: true, step: true, value: (one) => one.wanted_prefill },
  ], { format: number, gap: Infinity, least: 2 });
  const demand = new LineChart("Demand", [
    { label: "requests/s", kind: "s3", area: true, value: rate }, { label: "predicted", optional: true, kind: "s4", dashed: true, value: (one) => one.predicted },
  ], { format: number, gap: Infinity });
  const latency = (title, field, estimate) => new LineChart(title, [
    { label: "observed", kind: "s1", value: (one) => one[field] ?? null }, { label: "estimated", optional: true, kind: "s5", dashed: true, value: (one) => one[estimate] ?? null },
    { label: "objective", optional: true, kind: "bad", dashed: true, value: () => objectives[field] ?? null },
  ], { format: ms, gap: Infinity });
  const charts = [replicas, demand, latency("Time to first token", "ttft_ms", "estimated_ttft_ms"), latency("Inter-token latency", "itl_ms", "estimated_itl_ms")];
  const decisions = h("div");
  const node = h("section", { class: "stack" }, head, h("div", { class: "grid charts even" }, charts.map((one) => one.node)), decisions);

  function update(planner) {
    if (planner.error) {
      replace(head, h("h2", {}, planner.namespace), h("p", { class: "notice bad" }, planner.error));
      return;
    }
    objectives = planner.optimization_target === "sla" ? { ttft_ms: planner.ttft_ms, itl_ms: planner.itl_ms } : {};
    let decode = null, prefill = null;
    const items = planner.decisions.map((one) => {
      decode = one.scale_to?.num_decode ?? decode ?? one.counts?.ready_num_decode ?? null;
      prefill = one.scale_to?.num_prefill ?? prefill ?? one.counts?.ready_num_prefill ?? null;
      return { ...one, at: Date.parse(one.time) / 1000, wanted_decode: decode, wanted_prefill: prefill, predicted: predicted(one) };
    });
    for (const chart of charts) chart.update(items);
    const limits = Object.entries(planner.limits).filter(([, value]) => value !== null && value >= 0).map(([name, value]) => `${name.replaceAll("_", " ")} ${value}`);
    replace(head, h("div", { class: "row" }, h("h2", {}, planner.namespace), badge(planner.mode), badge(`target ${planner.optimization_target}`, "accent"), badge(planner.environment),
      planner.advisory ? badge("advisory: records, does not scale", "warn") : null, h("span", { class: "muted" }, `${planner.ticks} ticks${limits.length ? ` · ${limits.join(", ")}` : ""}`)),
    h("div", { class: "grid kpis" }, attainment("First token within objective", items, "ttft_ms", objectives), attainment("Between tokens within objective", items, "itl_ms", objectives),
      tile("Changes", String(items.filter((one) => one.scale_to).length), `of the last ${items.length} decisions`), tile("Demand", `${number(rate(items.at(-1) ?? {}))}/s`, "last window with traffic data")));
    const columns = [
      { title: "Time", cell: (one) => clock(one.at) }, { title: "Tick", num: true, cell: (one) => one.tick }, { title: "Action", cell: (one) => badge(one.action, one.scale_to ? "accent" : "") },
      { title: "Change to", cell: target }, { title: "Outcome", cell: (one) => (one.outcome ? badge(one.outcome, OUTCOMES[one.outcome]) : "–") },
      { title: "Load reason", cell: (one) => one.load_reason || "–" }, { title: "Throughput reason", cell: (one) => one.throughput_reason || "–" },
      { title: "Details", wrap: true, cell: (one) => [one.message, ...(one.clamped || []), ...(one.unknown || []).map((text) => `unknown: ${text}`)].filter(Boolean).join("; ") || "–" },
    ];
    keepFocus(decisions, () => replace(decisions, card("Decisions", "the newest first", items.length ? table(columns, items.toReversed().slice(0, 60), { label: "Decisions" }) : empty("No decision yet", "The first one follows after an interval."))));
  }
  return { node, update };
}

function predicted(decision) {
  const found = decision.predictions;
  if (!found || typeof found !== "object") return null;
  const requests = found.num_req ?? found.requests ?? null, seconds = found.duration_s ?? decision.traffic?.duration_s;
  return found.requests_per_second ?? found.request_rate ?? (requests !== null && seconds ? requests / seconds : null);
}

function target(decision) {
  if (!decision.scale_to) return "–";
  return ["prefill", "decode"].filter((role) => (decision.scale_to[`num_${role}`] ?? null) !== null).map((role) => `${decision.scale_to[`num_${role}`]} ${role}`).join(", ");
}

function tile(title, value, detail) {
  return h("div", { class: "card kpi" }, h("span", { class: "muted" }, title), h("strong", {}, value), h("span", { class: "detail muted" }, detail));
}

function attainment(title, items, field, objectives) {
  const known = items.filter((one) => one[field] !== null && one[field] !== undefined);
  if (!objectives[field]) return tile(title, "–", "no objective: another optimization target");
  const met = known.filter((one) => one[field] <= objectives[field]).length;
  return tile(title, known.length ? percent(met / known.length) : "–", `${ms(objectives[field])}, mean of ${known.length} windows`);
}

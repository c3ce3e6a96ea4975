// Requests: in flight and recent, each with the stages of its life as a waterfall.

import { get } from "../api.js";
import { badge, card, empty, h, keepFocus, replace, svg, table } from "../dom.js";
import { report } from "../live.js";
import { ago, clock, ms, number, shortId, whole } from "../format.js";

const POLL_MS = 1500;
const TABS = { "": "All", running: "In flight", slow: "Slowest", failed: "Failed" };
const KINDS = { running: "accent", succeeded: "good", failed: "bad" };
export const STAGES = {
  preprocess: ["Preprocess", "s6"], queue: ["Router queue", "s7"], prefill: ["Prefill worker", "s2"], route: ["Route", "s4"], dispatch: ["Dispatch", "s5"],
  first_token: ["Wait for first token", "s3"], decode: ["Generate", "s1"], move: ["Lost by a failure", "bad"], finish: ["Finish", "s6"],
  prefill_queue: ["Prefill queue", "s7"],
};
const IN_LEGEND = 7;

export function show(main, session, given) {
  return given ? one(main, given) : list(main);
}

function strip(request, longest) {
  const scale = 100 / Math.max(longest, 1e-6);
  const bars = request.stages.map((stage) => {
    const end = stage.end_ms ?? request.total_ms;
    return svg("rect", { class: `bar ${STAGES[stage.name]?.[1] || "s6"}`, x: stage.begin_ms * scale, y: 1, height: 8, width: Math.max(0.4, (end - stage.begin_ms) * scale) });
  });
  const moves = request.moves.map((move) => svg("rect", { class: "move", x: move.at_ms * scale, y: 0, width: 0.8, height: 10 }));
  return svg("svg", { class: "strip", viewBox: "0 0 100 10", preserveAspectRatio: "none", role: "img", "aria-label": request.explanation || request.state }, bars, moves);
}

// The cause in words, for example "slow worker".
function causeName(request) {
  return request.cause.replaceAll("-", " ");
}

function tokens(request) {
  const cached = request.cached_tokens ? ` (${whole(request.cached_tokens)} cached)` : "";
  return `${whole(request.prompt_tokens)}${cached} → ${whole(request.output_tokens)}`;
}

function list(main) {
  let tab = "", paused = false, rows = [], failure = null;
  const box = h("div", { class: "card" });
  const tabs = h("div", { class: "segmented", role: "group", "aria-label": "Which requests" }, Object.entries(TABS).map(([value, text]) => h("button", {
    type: "button", "aria-pressed": String(value === tab), onclick: (event) => {
      tab = value;
      for (const node of tabs.children) node.setAttribute("aria-pressed", String(node === event.currentTarget));
      poll();
    },
  }, text)));
  const pause = h("button", { type: "button", "aria-pressed": "false", onclick: () => {
    paused = !paused;
    pause.setAttribute("aria-pressed", String(paused));
    pause.textContent = paused ? "Continue" : "Pause";
    if (!paused) poll();
  } }, "Pause");
  const search = h("input", { type: "search", placeholder: "Request id, or chatcmpl-…", "aria-label": "Find a request by its id", onkeydown: (event) => {
    if (event.key === "Enter" && search.value.trim()) location.hash = `#/requests/${encodeURIComponent(search.value.trim())}`;
  } });
  const key = h("div", { class: "legend" }, Object.values(STAGES).slice(0, IN_LEGEND).map(([title, kind]) => h("span", { class: `item ${kind}` }, h("i", { "aria-hidden": "true" }), title)),
    h("span", { class: "item bad" }, h("i", { "aria-hidden": "true" }), "Moved to another worker"));
  replace(main, h("div", { class: "row between" }, h("h1", {}, "Requests"), h("div", { class: "search" }, search)), h("div", { class: "row between" }, h("div", { class: "row" }, tabs, pause), key), box);

  const columns = (longest) => [
    { title: "Started", cell: (row) => h("span", { title: clock(row.started_at) }, ago(row.started_at)) },
    { title: "Request", cell: (row) => (row.id ? h("a", { class: "mono", href: `#/requests/${row.id}`, "data-focus": row.id, title: row.id }, row.id.slice(0, 8)) : "refused") },
    { title: "State", cell: (row) => badge(row.state === "failed" ? row.error_type : row.state, KINDS[row.state]) },
    { title: "Cause", cell: (row) => (row.cause ? h("span", { title: row.explanation }, causeName(row)) : "–") },
    { title: "Model", cell: (row) => row.model || "–" },
    { title: "Stages", cell: (row) => strip(row, longest) },
    { title: "Total", num: true, cell: (row) => ms(row.total_ms) },
    { title: "TTFT", num: true, cell: (row) => ms(row.ttft_ms) },
    { title: "ITL", num: true, cell: (row) => ms(row.itl_ms) },
    { title: "Tokens", num: true, cell: tokens },
    { title: "Moves", num: true, cell: (row) => (row.moves.length ? badge(String(row.moves.length), "warn") : "0") },
    { title: "Worker", cell: (row) => h("code", { title: row.workers[0] }, row.prefill_worker ? `${shortId(row.prefill_worker)} → ${shortId(row.workers[0])}` : shortId(row.workers[0])) },
  ];

  function draw() {
    const longest = Math.max(...rows.map((row) => row.total_ms), 1);
    keepFocus(box, () => replace(box, failure ? h("p", { class: "notice bad" }, failure)
      : rows.length ? table(columns(longest), rows, { label: "Requests" })
      : empty(tab === "failed" ? "No request has failed" : tab === "running" ? "No request is in flight" : "No request yet", "Send one in the playground.", h("a", { href: "#/playground" }, "Open the playground"))));
  }

  const poll = repeat(async () => {
    if (paused) return;
    try {
      rows = (await get(`/console/api/requests?limit=100&state=${tab}`)).requests;
      failure = null;
    } catch (error) {
      failure = error.message;
    }
    draw();
    return failure === null;
  });
  return poll.stop;
}

// Calls `work` now and periodically while the page is visible; the result calls it at once. `work` returns false after a failure.
export function repeat(work, interval = POLL_MS) {
  let timer = null, ended = false;
  const run = async () => {
    clearTimeout(timer);
    if (ended) return;
    if (!document.hidden) {
      const isFine = await work();
      if (!ended) report(isFine === false ? "lost" : "live", isFine === false ? "Disconnected" : "Live");
    }
    if (!ended) timer = setTimeout(run, interval);
  };
  run.stop = () => { ended = true; clearTimeout(timer); };
  run();
  return run;
}

function one(main, id) {
  const box = h("div", { class: "stack" });
  replace(main, h("div", { class: "row" }, h("a", { href: "#/requests" }, "Requests"), h("span", { class: "muted", "aria-hidden": "true" }, "/"), h("h1", { class: "mono title" }, id)), box);
  let decisions = null;
  const poll = repeat(async () => {
    let found;
    try {
      [found] = (await get(`/console/api/requests?limit=1&id=${encodeURIComponent(id)}`)).requests;
    } catch (error) {
      replace(box, h("p", { class: "notice bad" }, error.message));
      return false;
    }
    if (!found) {
      replace(box, h("div", { class: "card" }, empty("This request is not kept", "The frontend keeps the last 1000 requests, the last 200 failures and the slowest of the last 15 minutes.")));
      return true;
    }
    decisions ??= await get(`/console/api/routing?id=${encodeURIComponent(found.id)}`).then((answer) => answer.decisions.length > 0, () => null);
    keepFocus(box, () => replace(box, detail(found, decisions)));
    if (found.state !== "running") setTimeout(() => poll.stop());
    return true;
  }, 1000);
  return poll.stop;
}

function detail(request, isRouted) {
  const facts = [
    ["Model", request.model || "–"], ["Endpoint", request.endpoint], ["Started", clock(request.started_at)], ["Total", ms(request.total_ms)],
    ["Time to first token", ms(request.ttft_ms)], ["Between tokens", ms(request.itl_ms)], ["Tokens", tokens(request)],
    ["Worker", h("code", {}, request.workers.join(", ") || "–")], request.prefill_worker ? ["Prefill worker", h("code", {}, request.prefill_worker)] : null,
    request.blocks ? ["Cached blocks on the worker", `${request.overlap_blocks} of ${request.blocks}`] : null,
    request.cost !== null ? ["Router cost", number(request.cost)] : null,
  ].filter(Boolean);
  return [
    h("div", { class: "row" }, badge(request.state === "failed" ? request.error_type : request.state, KINDS[request.state]), badge(request.type || "–"),
      request.cause ? badge(`cause: ${causeName(request)}`, "accent") : null),
    request.explanation ? h("p", { class: `notice ${request.state === "failed" ? "bad" : ""}` }, request.explanation) : null,
    card("Stages", ms(request.total_ms), h("div", { class: "body" }, waterfall(request))),
    request.moves.length ? card("Moved to another worker", `${request.moves.length} time(s)`, table([
      { title: "After", num: true, cell: (move) => ms(move.at_ms) }, { title: "Failed worker", cell: (move) => h("code", {}, move.worker || "–") },
      { title: "Tokens before", num: true, cell: (move) => whole(move.tokens) }, { title: "Cause", wrap: true, cell: (move) => move.error },
    ], request.moves, { label: "Moves" })) : null,
    card("Facts", null, h("dl", { class: "facts body" }, facts.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))))),
    isRouted ? h("p", {}, h("a", { class: "button", href: `#/routing/${request.id}` }, "Why this worker?")) : null,
  ];
}

function waterfall(request) {
  const total = Math.max(request.total_ms, 1e-6);
  return h("ol", { class: "waterfall" }, request.stages.map((stage) => {
    const end = stage.end_ms ?? request.total_ms;
    const [title, kind] = STAGES[stage.name] || [stage.name, "s6"];
    const bar = svg("svg", { viewBox: "0 0 100 10", preserveAspectRatio: "none", "aria-hidden": "true" },
      svg("rect", { class: "track", width: 100, height: 10 }),
      svg("rect", { class: `bar ${kind}`, x: (stage.begin_ms / total) * 100, y: 0, height: 10, width: Math.max(0.35, ((end - stage.begin_ms) / total) * 100) }),
      request.moves.map((move) => svg("rect", { class: "move", x: (move.at_ms / total) * 100, width: 0.5, height: 10 })));
    return h("li", {}, h("span", {}, title), bar, h("span", { class: "num" }, stage.end_ms === null ? "in progress" : ms(end - stage.begin_ms)));
  }));
}

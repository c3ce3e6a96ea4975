// Routing: the last decisions of the KV router. Each shows why its worker was chosen: every candidate with the terms of its cost.

import { get, hex } from "../api.js";
import { badge, card, empty, h, keepFocus, replace, svg, table } from "../dom.js";
import { number, shortId, whole } from "../format.js";
import { repeat } from "./requests.js";

const SHOWN = 60;
const TERMS = [["adjusted", "prefill to compute", "s3"], ["decode", "blocks occupied", "s2"], ["other", "requests and policy", "s6"]];

export function show(main, session, given) {
  let decisions = [], chosen = given || "", paused = Boolean(given), failure = null, routers = [];
  const listBox = h("div", { class: "card picks" });
  const detailBox = h("div", { class: "stack" });
  const pause = h("button", { type: "button", "aria-pressed": String(paused), onclick: () => {
    paused = !paused;
    pause.setAttribute("aria-pressed", String(paused));
    pause.textContent = paused ? "Follow" : "Pause";
    if (!paused) poll();
  } }, paused ? "Follow" : "Pause");
  const state = h("div", { class: "row" });
  replace(main, h("div", { class: "row between" }, h("h1", {}, "Routing"), h("div", { class: "row" }, state, pause)), h("div", { class: "grid split" }, listBox, detailBox));

  const poll = repeat(async () => {
    if (paused && (decisions.length || failure)) return true;
    try {
      let found = await get(`/console/api/routing?limit=${SHOWN}`);
      routers = found.routers;
      if (given && !found.decisions.some((one) => one.decision.request_id.endsWith(given.slice(-36)))) {
        found = { decisions: [...(await get(`/console/api/routing?id=${encodeURIComponent(given)}`)).decisions, ...found.decisions] };
      }
      decisions = found.decisions.map((one) => ({ ...one.decision, model: one.model, role: one.role, total: one.candidates }));
      failure = null;
    } catch (error) {
      failure = error.message;
    }
    draw();
    return failure === null;
  }, 2000);

  function current() {
    return decisions.find((one) => one.request_id === chosen || (chosen && one.request_id.endsWith(chosen.slice(-36)))) || (given ? null : decisions[0]) || null;
  }

  function draw() {
    const now = current();
    replace(state, routers.map((one) => badge(`${one.model}${one.role === "aggregated" ? "" : ` ${one.role}`}: ${one.policy}, ${whole(one.indexed_blocks)} blocks indexed, ${one.waiting} waiting`)));
    keepFocus(listBox, () => replace(listBox, failure ? h("p", { class: "notice bad" }, failure) : decisions.length
      ? h("ul", { "aria-label": "Last decisions" }, decisions.map((one) => h("li", {}, h("button", {
        type: "button", "aria-current": one === now ? "true" : null, "data-focus": `${one.request_id}-${one.role}`,
        onclick: () => { chosen = one.request_id; given = ""; paused = true; pause.textContent = "Follow"; pause.setAttribute("aria-pressed", "true"); draw(); },
      }, h("code", {}, one.request_id.slice(0, 8)), h("span", {}, `→ ${shortId(hex(one.worker_id))}`), h("span", { class: "muted" }, `${whole(one.prompt_tokens)} tok${one.role === "aggregated" ? "" : ` · ${one.role}`}`)))))
      : empty("No decision yet", "Decisions are kept by frontends with --router-mode kv.")));
    replace(detailBox, now ? explain(now) : decisions.length ? h("div", { class: "card" }, empty("No decision for this request is kept", "")) : null);
  }
  return poll.stop;
}

function parts(candidate, scale) {
  const adjusted = Math.max(0, candidate.prefill - candidate.saved) * scale;
  const cost = candidate.cost ?? 0;
  return { adjusted, decode: candidate.decode, other: Math.max(0, cost - adjusted - candidate.decode), saved: Math.min(candidate.saved, candidate.prefill) * scale };
}

function explain(decision) {
  const scale = decision.weights.prefill_load_scale ?? 1;
  const rows = decision.candidates;
  const winner = rows.find((one) => one.worker_id === decision.worker_id && one.dp_rank === decision.dp_rank);
  const widest = Math.max(...rows.map((one) => { const p = parts(one, scale); return p.adjusted + p.decode + p.other + p.saved; }), 1);
  const isUpstream = decision.policy === "dynamo";
  const bars = h("ol", { class: "costs" }, rows.map((one) => {
    const p = parts(one, scale);
    let at = 0;
    const segment = (value, kind) => {
      const rect = svg("rect", { class: `bar ${kind}`, x: (at / widest) * 100, width: (value / widest) * 100, height: 10 });
      at += value;
      return value > 0 ? rect : null;
    };
    const name = `${shortId(hex(one.worker_id))}${one.dp_rank ? `.${one.dp_rank}` : ""}`;
    const picture = svg("svg", { viewBox: "0 0 100 10", preserveAspectRatio: "none", role: "img", "aria-label": `${name}: cost ${number(one.cost)}, prefill ${number(p.adjusted)}, decode ${number(p.decode)}, saved ${number(p.saved)}` },
      svg("rect", { class: "track", width: 100, height: 10 }), one.filtered ? null : [segment(p.adjusted, "s3"), segment(p.decode, "s2"), segment(p.other, "s6"), segment(p.saved, "saved")]);
    return h("li", { class: one === winner ? "winner" : null }, h("span", { class: "name" }, h("code", { title: hex(one.worker_id) }, name), one === winner ? badge("chosen", "accent") : one.filtered ? badge(one.filtered, "warn") : null),
      picture, h("span", { class: "num" }, one.cost === null ? "–" : number(one.cost)));
  }));
  const columns = [
    { title: "Worker", cell: (one) => h("code", {}, hex(one.worker_id) + (one.dp_rank ? `.${one.dp_rank}` : "")) },
    { title: "Cost", num: true, cell: (one) => (one.filtered ? one.filtered : number(one.cost)) },
    { title: "Cached (GPU)", num: true, cell: (one) => whole(one.device) }, { title: "Host", num: true, cell: (one) => whole(one.host) },
    { title: "Disk", num: true, cell: (one) => whole(one.disk) }, { title: "Shared", num: true, cell: (one) => whole(one.shared) },
    { title: "Prefill queued", num: true, cell: (one) => whole(one.active_prefill_tokens) }, { title: "In use", num: true, cell: (one) => whole(one.active_blocks) },
    { title: "Requests", num: true, cell: (one) => whole(one.active_requests) }, { title: "Prefill", num: true, cell: (one) => number(one.prefill) },
    { title: "Saved", num: true, cell: (one) => number(one.saved) }, { title: "Decode", num: true, cell: (one) => number(one.decode) },
  ];
  const key = h("div", { class: "legend" }, TERMS.map(([, title, kind]) => h("span", { class: `item ${kind}` }, h("i", { "aria-hidden": "true" }), title)), h("span", { class: "item saved" }, h("i", { "aria-hidden": "true" }), "saved by the cache"));
  return [
    card("Why this worker?", h("a", { href: `#/requests/${decision.request_id}` }, `request ${decision.request_id.slice(0, 8)}`),
      h("div", { class: "body stack" }, h("p", {}, sentence(decision, winner)), key, bars,
        isUpstream ? null : h("p", { class: "muted" }, `Policy ${decision.policy}: the cost has the unit of the policy; the bars show its inputs in blocks.`))),
    card("Candidates", `${rows.length < decision.total ? `${rows.length} of ${decision.total}` : rows.length}, the cheapest first`, table(columns, rows, { label: "Candidates", attributes: (one) => ({ "aria-selected": one === winner ? "true" : null }) })),
    card("Weights", decision.policy, h("dl", { class: "facts body" }, Object.entries(decision.weights).map(([name, value]) => h("div", {}, h("dt", {}, name.replaceAll("_", " ")), h("dd", {}, String(value)))))),
  ];
}

function sentence(decision, winner) {
  const able = decision.candidates.filter((one) => one.cost !== null && !one.filtered);
  const head = `${whole(decision.prompt_tokens)} prompt tokens, ${whole(decision.prompt_blocks)} complete blocks. `;
  if (!winner) return head;
  const cached = winner.device + winner.host + winner.disk;
  const most = Math.max(...able.map((one) => one.device + one.host + one.disk));
  const cache = cached ? `${cached} of its blocks are cached there` : "none of its blocks are cached there";
  if (able.length === 1) return `${head}It was the only eligible worker; ${cache}.`;
  const next = able.filter((one) => one !== winner)[0];
  const versus = `cost ${number(winner.cost)} against ${number(next.cost)} of the next`;
  if (cached === most && cached > 0) return `${head}Chosen for its cache: ${cache}, ${versus}.`;
  if (most > cached) return `${head}Chosen for its load: another worker has ${most} blocks cached but is busier; ${versus}.`;
  return `${head}Chosen for its load: ${cache}, ${versus}.`;
}

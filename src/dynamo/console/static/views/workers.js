// Workers: role, load, cache, version and last error of each; drain and resume for admins.

import { post } from "../api.js";
import { badge, card, empty, h, keepFocus, meter, replace, table } from "../dom.js";
import { ago, duration, number, percent, shortId, whole } from "../format.js";
import { state, subscribe } from "../live.js";

const KINDS = { serving: "good", draining: "warn", drained: "warn", stopping: "warn", unresponsive: "bad" };

export function show(main, session) {
  let words = "", message = null, busy = new Set();
  const box = h("div", { class: "stack" });
  const said = h("div", { role: "status" });
  const filter = h("input", { type: "search", placeholder: "Filter by model, role, host or id", "aria-label": "Filter workers", oninput: (event) => { words = event.target.value.toLowerCase(); draw(); } });
  replace(main, h("div", { class: "row between" }, h("h1", {}, "Workers"), h("div", { class: "search" }, filter)), said, box);

  async function act(worker, action) {
    const name = `${worker.component} ${shortId(worker.id)}`;
    if (action === "drain" && !confirm(`Drain ${name}? It completes its requests and accepts no new ones until it is resumed.`)) return;
    busy.add(worker.id);
    draw();
    try {
      const status = await post(`/console/api/workers/${encodeURIComponent(worker.namespace)}/${encodeURIComponent(worker.component)}/${worker.id}/${action}`);
      message = h("p", { class: "notice" }, `${name}: ${status.state}, ${status.inflight_requests} request(s) in flight.`);
    } catch (error) {
      message = h("p", { class: "notice bad" }, `${name}: ${error.message}`);
    }
    busy.delete(worker.id);
    replace(said, message);
    draw();
  }

  function actions(worker) {
    if (!worker.is_controllable) return h("span", { class: "muted", title: "This worker has no control endpoint: it is a released one, or a Python handler." }, "–");
    const action = worker.state === "serving" || worker.state === "unresponsive" ? "drain" : "resume";
    const reason = session.mayAct ? null : "Actions need an admin key (--admin-api-key)";
    return h("button", {
      type: "button", class: "small", disabled: !session.mayAct || busy.has(worker.id) || worker.state === "stopping", title: reason, "data-focus": `act-${worker.id}`,
      "aria-label": `${action} ${worker.component} ${worker.id}`, onclick: () => act(worker, action),
    }, action === "drain" ? "Drain" : "Resume");
  }

  function sum(worker, field) {
    const known = worker.ranks.map((one) => one[field]).filter((one) => one !== null);
    return known.length ? known.reduce((one, two) => one + two, 0) : null;
  }

  function cache(worker) {
    const total = sum(worker, "kv_total"), used = sum(worker, "kv_used");
    if (!total || used === null) return "–";
    return h("span", { title: `${whole(used)} of ${whole(total)} blocks` }, meter(used / total, percent(used / total)));
  }

  function cached(worker) {
    const rate = worker.ranks.find((rank) => rank.hit_rate !== null)?.hit_rate ?? null;
    return h("div", { class: "two" }, h("span", {}, number(sum(worker, "cached_blocks"))), rate === null ? null : h("span", { class: "muted" }, `${percent(rate)} hits`));
  }

  function identity(worker) {
    return h("div", { class: "two" }, h("code", { title: worker.id }, worker.id), h("span", { class: "muted" }, [worker.host, worker.address].filter(Boolean).join(" · ")));
  }

  function error(worker) {
    const found = worker.last_error;
    if (worker.control_error) return h("span", { class: "problem" }, worker.control_error);
    return found ? h("div", { class: "two" }, h("span", { class: "problem" }, found.message), h("span", { class: "muted" }, ago(found.at))) : h("span", { class: "muted" }, "none");
  }

  const columns = [
    { title: "Worker", cell: identity },
    { title: "State", cell: (one) => badge(one.state, KINDS[one.state]) },
    { title: "Role", cell: (one) => one.role || "–" },
    { title: "In flight", num: true, cell: (one) => whole(one.in_flight) },
    { title: "Waiting", num: true, cell: (one) => whole(sum(one, "waiting")) },
    { title: "Prefill tokens", num: true, cell: (one) => number(sum(one, "prefill_tokens")) },
    { title: "KV in use", cell: cache },
    { title: "Cached blocks", num: true, cell: cached },
    { title: "Engine", cell: (one) => h("div", { class: "two" }, h("span", {}, one.engine || "–"), h("span", { class: "muted" }, one.version ? `dynamo ${one.version}` : "")) },
    { title: "Up", num: true, cell: (one) => (one.started_at ? duration(Date.now() / 1000 - one.started_at) : "–") },
    { title: "Last error", wrap: true, cell: error },
    { title: "", cell: actions },
  ];

  function draw(name = "workers") {
    if (name === "sample") return;
    const matches = state.workers.filter((one) => [one.id, one.host, one.role, one.component, one.state, ...one.models].join(" ").toLowerCase().includes(words));
    const groups = new Map();
    for (const one of matches) {
      const title = one.models.length ? one.models.join(", ") : "No model";
      groups.set(title, [...(groups.get(title) || []), one]);
    }
    keepFocus(box, () => replace(box, matches.length
      ? [...groups].map(([title, rows]) => card(title, `${rows.length} worker${rows.length === 1 ? "" : "s"} · ${[...new Set(rows.map((one) => `${one.namespace}.${one.component}`))].join(", ")}`,
        table(columns, rows, { label: `Workers of ${title}` })))
      : h("div", { class: "card" }, state.workers.length ? empty("No worker matches", "") : empty("No worker is registered", "Start one, for example: python -m dynamo.mocker --model-name demo"))));
  }
  draw();
  return subscribe(draw);
}

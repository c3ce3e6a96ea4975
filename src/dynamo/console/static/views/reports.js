// Reports: replay reports of a directory, their main numbers, and a comparison of those that are selected.

import { get, open } from "../api.js";
import { card, empty, h, replace, table } from "../dom.js";
import { report } from "../live.js";
import { ago, bytes, ms, number, percent, whole } from "../format.js";

const HIGHER = /throughput|goodput|reused_ratio|completed/;

export function show(main) {
  const box = h("div", { class: "stack" });
  const compared = h("div");
  const selected = new Set();
  replace(main, h("h1", {}, "Reports"), box, compared);

  async function load() {
    let found;
    try {
      found = await get("/console/api/reports");
      report("live", "Ready");
    } catch (error) {
      replace(box, h("p", { class: "notice bad" }, error.message));
      return;
    }
    if (!found.reports.length) {
      replace(box, h("div", { class: "card" }, found.is_set ? empty("The directory has no reports", "Write one: dynamo replay TRACE.jsonl --report-json DIRECTORY/NAME.json")
        : empty("No directory of reports", `Set ${found.variable} of the frontend to a directory with the files of dynamo replay --report-json and --report-html.`)));
      return;
    }
    const s = (row, name) => row.summary[name];
    replace(box, card("Files", `${found.reports.length}; select two or more to compare them`, table([
      { title: "", cell: (row) => (Object.keys(row.summary).length ? h("input", { type: "checkbox", "aria-label": `Compare ${row.name}`, onchange: (event) => {
        if (event.target.checked) selected.add(row.name); else selected.delete(row.name);
        compare();
      } }) : "") },
      { title: "Report", cell: (row) => h("button", { type: "button", class: "ghost link", onclick: () => download(row.name) }, row.name) },
      { title: "Written", cell: (row) => ago(row.modified_at) }, { title: "Size", num: true, cell: (row) => bytes(row.bytes) },
      { title: "Requests", num: true, cell: (row) => whole(s(row, "completed_requests")) }, { title: "Requests/s", num: true, cell: (row) => number(s(row, "request_throughput_rps")) },
      { title: "Output tok/s", num: true, cell: (row) => number(s(row, "output_throughput_tok_s")) }, { title: "TTFT mean", num: true, cell: (row) => ms(s(row, "mean_ttft_ms")) },
      { title: "TTFT p95", num: true, cell: (row) => ms(s(row, "p95_ttft_ms")) }, { title: "ITL mean", num: true, cell: (row) => ms(s(row, "mean_itl_ms")) },
      { title: "Cached", num: true, cell: (row) => percent(s(row, "prefix_cache_reused_ratio")) },
    ], found.reports, { label: "Reports" })));
  }

  async function download(name) {
    const response = await open(`/console/api/reports/${encodeURIComponent(name)}`);
    const url = URL.createObjectURL(await response.blob());
    h("a", { href: url, download: name }).click();
    URL.revokeObjectURL(url);
  }

  async function compare() {
    if (selected.size < 2) {
      replace(compared);
      return;
    }
    const names = [...selected];
    const reports = await Promise.all(names.map(async (name) => { const found = await get(`/console/api/reports/${encodeURIComponent(name)}`); return found.summary || found; }));
    const fields = Object.keys(reports[0]).filter((name) => reports.every((one) => typeof one[name] === "number")).sort();
    const best = (name) => { const values = reports.map((one) => one[name]); return HIGHER.test(name) ? Math.max(...values) : name.endsWith("_ms") ? Math.min(...values) : null; };
    const columns = [{ title: "Number", cell: (name) => name.replaceAll("_", " ") }, ...names.map((title, place) => ({
      title, num: true, cell: (name) => (reports[place][name] === best(name) && reports.some((one) => one[name] !== reports[place][name]) ? h("strong", {}, number(reports[place][name])) : number(reports[place][name])),
    }))];
    replace(compared, card("Comparison", "the better value is bold", table(columns, fields, { label: "Comparison" })));
  }
  load();
}

// The live state: one stream of events while a view needs it and the page is visible.

import { ApiError, events, open } from "./api.js";

const SAMPLES_MAX = 900;
const RETRY_MS = 2000;

const listeners = new Set();
const statusListeners = new Set();
export const state = { overview: null, samples: [], models: [], workers: [] };
let controller = null;

export function subscribe(listener) {
  listeners.add(listener);
  if (state.overview) listener("overview");
  run();
  return () => {
    listeners.delete(listener);
    if (!listeners.size) stop();
  };
}

export function onStatus(listener) {
  statusListeners.add(listener);
}

export function restart() {
  stop();
  run();
}

function stop() {
  controller?.abort();
  controller = null;
}

export function report(kind, text) {
  for (const one of statusListeners) one(kind, text);
}

function notify(name) {
  for (const one of listeners) one(name);
}

async function run() {
  if (controller || !listeners.size || document.hidden) return;
  const own = (controller = new AbortController());
  while (!own.signal.aborted) {
    try {
      const response = await open("/console/api/live", { signal: own.signal });
      report("live", "Live");
      for await (const event of events(response)) {
        if (own.signal.aborted) return;
        apply(event.name, JSON.parse(event.data));
      }
      report("lost", "Disconnected");
    } catch (error) {
      if (own.signal.aborted) return;
      if (error instanceof ApiError && (error.status === 401 || error.status === 403)) {
        report("lost", "Key needed");
        notify("refused");
        controller = null;
        return;
      }
      report("lost", error instanceof ApiError && error.status === 503 ? "Too many watchers" : "Disconnected");
    }
    await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
  }
}

function apply(name, data) {
  if (name === "overview") {
    state.overview = data;
    state.samples = data.samples;
    state.models = data.models;
    state.workers = data.workers;
  } else if (name === "workers") {
    state.models = data.models;
    state.workers = data.workers;
  } else if (name === "sample") {
    state.samples.push(data);
    if (state.samples.length > SAMPLES_MAX) state.samples.shift();
  }
  notify(name);
}

document.addEventListener("visibilitychange", () => {
  if (document.hidden) {
    stop();
    report("paused", "Paused");
  } else run();
});

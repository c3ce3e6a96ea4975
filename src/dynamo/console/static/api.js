// Requests to the frontend that served this page, with the API key of this tab.

const KEY = "dynamo-console-key";
const WORKER_IDS = /"(worker_id|instance_id)":(\d{16,})/g;  // 64-bit numbers, which JSON.parse would round.

export class ApiError extends Error {
  constructor(status, message, code) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

export const key = {
  get: () => sessionStorage.getItem(KEY) || "",
  set: (value) => (value ? sessionStorage.setItem(KEY, value) : sessionStorage.removeItem(KEY)),
};

export function headers(more = {}) {
  return key.get() ? { authorization: `Bearer ${key.get()}`, ...more } : more;
}

export async function open(path, options = {}) {
  let response;
  try {
    response = await fetch(path, { ...options, headers: headers(options.headers), cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "The frontend does not respond");
  }
  if (!response.ok) throw await failure(response);
  return response;
}

export async function get(path, options = {}) {
  const text = await (await open(path, options)).text();
  return JSON.parse(text.replace(WORKER_IDS, '"$1":"$2"'));
}

export async function post(path, signal) {
  return (await open(path, { method: "POST", signal })).json();
}

async function failure(response) {
  const text = await response.text();
  try {
    const body = JSON.parse(text);
    const nested = body.error && typeof body.error === "object" ? body.error : body;
    return new ApiError(response.status, nested.message || String(body.error || text), nested.code);
  } catch {
    return new ApiError(response.status, text.trim() || response.statusText);
  }
}

// Yields the events of a stream as {name, data}.
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      rest += value;
      const parts = rest.split(/\r?\n\r?\n/);
      rest = parts.pop();
      for (const part of parts) {
        const found = { name: "message", data: "" };
        for (const line of part.split(/\r?\n/)) {
          if (line.startsWith("event:")) found.name = line.slice(6).trim();
          else if (line.startsWith("data:")) found.data += (found.data ? "\n" : "") + line.slice(5).replace(/^ /, "");
        }
        if (found.data) yield found;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

export function hex(id) {
  return id === null || id === undefined ? "" : BigInt(id).toString(16);
}

// OpenAI's client for Node: its whole surface as far as it is ours.
//
// Called with the directory where it is installed, the address of a frontend, that of one that asks for keys, and a key
// that may ask once a minute; it prints a line for each check.

import assert from "node:assert/strict";
import { mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { createRequire } from "node:module";
import { tmpdir } from "node:os";
import { join } from "node:path";

const [home, url, keyedUrl, slowKey] = process.argv.slice(2);
const require = createRequire(`${home}/index.js`);
const { OpenAI, ...errors } = require("openai");
const { zodFunction, zodResponseFormat } = require("openai/helpers/zod");
const { z } = require("zod");
const { version } = require("openai/version");

const MODEL = "m", DEMO = "demo", EMBEDDER = "e", GREETING = "Hello there.";
const USER = [{ role: "user", content: "hi" }];
const WEATHER = {
  type: "function",
  function: {
    name: "get_weather",
    parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
  },
};
const CALLED = { city: "Malmö 🇸🇪" };
const CALL = `<tool_call>\n{"name": "get_weather", "arguments": ${JSON.stringify(CALLED)}}\n</tool_call>`;
const CALLING = `<think>Two and two. €😀</think>Let me see.${CALL}${CALL.replace("Malmö", "Oslo")}`;
const Place = z.object({ city: z.string().max(12), is_large: z.boolean() });

const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0, timeout: 60_000 });
const says = (text, how = {}) => ({ nvext: { annotations: ["script:" + JSON.stringify({ texts: [text], ...how })] } });
const ask = (fields = {}, asker = client) =>
  asker.chat.completions.create({ model: MODEL, messages: USER, ...fields });

async function raises(kind, call) {
  const error = await call().then(() => assert.fail(`no ${kind.name} was raised`), (error) => error);
  assert.equal(error.constructor.name, kind.name, String(error));
  return error;
}

async function all(stream) {
  const found = [];
  for await (const one of stream) found.push(one);
  return found;
}

const checks = {
  async chat_completes() {
    const answer = await ask({ seed: 7, user: "someone", metadata: { a: "b" } });
    assert.equal(answer.choices[0].message.content, GREETING);
    assert.equal(answer.choices[0].finish_reason, "stop");
    assert.equal(answer.usage.total_tokens, answer.usage.prompt_tokens + answer.usage.completion_tokens);
  },
  async stream_equals_unary_response() {
    const chunks = await all(await ask({ stream: true, stream_options: { include_usage: true } }));
    assert.equal(chunks[0].choices[0].delta.role, "assistant");
    assert.equal(chunks.map((one) => one.choices[0]?.delta.content ?? "").join(""), GREETING);
    assert.ok(chunks.at(-1).usage.completion_tokens > 0);
  },
  async tool_calls_and_reasoning_unary_and_streamed() {
    for (const cuts of [[], [1], [3, 1, 7]]) {
      const fields = { model: MODEL, messages: USER, tools: [WEATHER], ...says(CALLING, { cuts }) };
      const { message } = (await ask(fields)).choices[0];
      assert.equal(message.content, "Let me see.");
      assert.equal(message.reasoning_content, "Two and two. €😀");
      assert.deepEqual(JSON.parse(message.tool_calls[0].function.arguments), CALLED);
      const final = await client.chat.completions.stream(fields).finalChatCompletion();
      const calls = (one) => one.tool_calls.map((call) => call.function.arguments);
      assert.deepEqual(calls(final.choices[0].message), calls(message));
    }
  },
  async tool_runner_calls_tools() {
    const text = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo", "is_large": true}}\n</tool_call>';
    let asked = null;
    const tool = zodFunction({ name: "get_weather", parameters: Place, function: (place) => { asked = place; return "12"; } });
    const runner = client.chat.completions.runTools(
      { model: MODEL, messages: USER, tools: [tool], ...says(text) }, { maxChatCompletions: 1 },
    );
    await runner.done();
    assert.deepEqual(asked, { city: "Oslo", is_large: true });
  },
  async parsed_response_has_the_model_type() {
    const answer = await client.chat.completions.parse({
      model: DEMO, messages: USER, temperature: 0, max_tokens: 200, response_format: zodResponseFormat(Place, "place"),
    });
    assert.ok(Place.safeParse(answer.choices[0].message.parsed).success);
  },
  async logprobs_and_several_choices() {
    const answer = await ask({ logprobs: true, top_logprobs: 2 });
    assert.equal(answer.choices[0].logprobs.content[0].top_logprobs.length, 2);
    const several = await ask({ n: 2, nvext: { annotations: ['script:{"texts":["one","two"]}'] } });
    assert.deepEqual(several.choices.map((one) => one.message.content), ["one", "two"]);
  },
  async image_is_passed_to_the_worker() {
    const messages = [{ role: "user", content: [{ type: "image_url", image_url: { url: "https://example.com/p.png" } }] }];
    assert.equal((await ask({ messages })).choices[0].message.content, GREETING);
    await raises(errors.BadRequestError, () => ask({ model: DEMO, messages }));
  },
  async completions_and_embeddings() {
    const answer = await client.completions.create({ model: MODEL, prompt: ["a", "b"] });
    assert.deepEqual(answer.choices.map((one) => one.text), [GREETING, GREETING]);
    const pieces = await all(await client.completions.create({ model: MODEL, prompt: "a", stream: true }));
    assert.equal(pieces.map((one) => one.choices[0]?.text ?? "").join(""), GREETING);
    const vectors = await client.embeddings.create({ model: EMBEDDER, input: ["one", "two"] });
    const plain = await client.embeddings.create({ model: EMBEDDER, input: "one", encoding_format: "float" });
    assert.equal(vectors.data.length, 2);
    plain.data[0].embedding.forEach((one, place) => assert.ok(Math.abs(one - vectors.data[0].embedding[place]) < 1e-6));
  },
  async models_are_listed() {
    const names = (await all(client.models.list())).map((model) => model.id);
    assert.ok([MODEL, DEMO, EMBEDDER].every((name) => names.includes(name)));
    await raises(errors.NotFoundError, () => client.models.retrieve("no-such-model"));
  },
  async responses_are_stored_and_continued() {
    const first = await client.responses.create({ model: MODEL, input: "hi" });
    assert.equal(first.output_text, GREETING);
    const second = await client.responses.create({ model: MODEL, input: "and?", previous_response_id: first.id });
    assert.equal(second.previous_response_id, first.id);
    assert.equal((await client.responses.retrieve(first.id)).output_text, GREETING);
    await client.responses.delete(first.id);
    await raises(errors.NotFoundError, () => client.responses.retrieve(first.id));
    const events = await all(client.responses.stream({ model: MODEL, input: "hi" }));
    assert.equal(events.at(-1).type, "response.completed");
  },
  async raw_response_has_headers() {
    const { data, response } = await client.chat.completions
      .create({ model: MODEL, messages: USER }, { headers: { "x-request-id": "mine" } }).withResponse();
    assert.equal(response.headers.get("x-request-id"), "mine");
    assert.equal(data._request_id, "mine");
  },
  async concurrent_requests_complete() {
    const answers = await Promise.all([...Array(20).keys()].map((number) => ask(says(`I am ${number}`))));
    answers.forEach((answer, number) => assert.equal(answer.choices[0].message.content, `I am ${number}`));
  },
  async stream_can_be_closed_early() {
    const stream = await ask({ stream: true, ...says("many words ".repeat(100)) });
    for await (const _ of stream) break;
    assert.equal((await ask()).choices[0].message.content, GREETING);
  },
  async errors_have_the_client_types() {
    const error = await raises(errors.BadRequestError, () => ask({ temperature: 3 }));
    assert.deepEqual([error.status, error.param, error.type], [400, "temperature", "invalid_request_error"]);
    await raises(errors.NotFoundError, () => ask({ model: "no-such-model" }));
    await raises(errors.InternalServerError, () => ask(says("x", { fails_after: 0, fails_as: "Unknown" })));
    // The worker fails once a part is read: a frontend that receives tokens and error at once sends the error alone.
    const folder = mkdtempSync(join(tmpdir(), "late-")), read = join(folder, "read");
    const late = says("many words before it ends ".repeat(60), { fails_after: 200, fails_as: "Unknown", fails_when: read });
    const stream = await ask({ stream: true, ...late });
    const broken = await raises(errors.APIError, async () => { for await (const _ of stream) writeFileSync(read, ""); });
    rmSync(folder, { recursive: true });
    assert.match(broken.message, /Internal server error/);
    const unreachable = new OpenAI({ baseURL: "http://127.0.0.1:1/v1", apiKey: "none", maxRetries: 0 });
    await raises(errors.APIConnectionError, () => unreachable.models.list());
  },
  async unauthorized_keys_are_refused() {
    const of = (apiKey) => new OpenAI({ baseURL: `${keyedUrl}/v1`, apiKey, maxRetries: 0 });
    assert.equal((await ask({}, of("key-good"))).choices[0].message.content, GREETING);
    await raises(errors.AuthenticationError, () => ask({}, of("key-wrong")));
    await raises(errors.PermissionDeniedError, () => ask({}, of("key-narrow")));
    await ask({}, of(slowKey));
    await raises(errors.RateLimitError, () => ask({}, of(slowKey)));
  },
};

console.log(`openai ${version ?? require("openai/version").VERSION} on Node ${process.version}`);
let failed = 0;
for (const [name, check] of Object.entries(checks)) {
  try {
    await check();
    console.log(`ok ${name}`);
  } catch (error) {
    failed += 1;
    console.log(`FAILED ${name}\n${error.stack}`);
  }
}
console.log(`${Object.keys(checks).length} checks, ${failed} failed`);
process.exit(failed ? 1 : 0);

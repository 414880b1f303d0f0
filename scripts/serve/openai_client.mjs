// A handful of calls through the npm package `openai`: node openai_client.mjs http://127.0.0.1:8000/v1
import assert from "node:assert/strict";
import OpenAI from "openai";

const client = new OpenAI({ baseURL: process.argv[2], apiKey: "none", maxRetries: 0 });
const model = (await client.models.list()).data[0].id;
const messages = [{ role: "user", content: "What is the capital of France?" }];
const ask = { model, messages, temperature: 0, max_completion_tokens: 24 };

const whole = (await client.chat.completions.create(ask)).choices[0].message.content;
assert.match(whole, /Paris/);
let text = "";
let usage;
const options = { stream: true, stream_options: { include_usage: true } };
for await (const chunk of await client.chat.completions.create({ ...ask, ...options })) {
  text += chunk.choices[0]?.delta?.content ?? "";
  usage = chunk.usage ?? usage;
}
assert.equal(text, whole);
assert.ok(usage.completion_tokens > 0);
const completion = await client.completions.create({ model, prompt: "The capital of France is", temperature: 0, max_tokens: 4, logprobs: 2 });
assert.equal(completion.choices[0].logprobs.tokens.length, 4);
await assert.rejects(client.chat.completions.create({ ...ask, temperature: -1 }), OpenAI.BadRequestError);
await assert.rejects(client.chat.completions.create({ ...ask, model: "none" }), OpenAI.NotFoundError);
const open = await client.chat.completions.create({ ...ask, stream: true, max_completion_tokens: 2000 });
for await (const _ of open) break;
console.log("the npm package: all as it should be");

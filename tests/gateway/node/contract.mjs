// Does one thing with OpenAI's or Anthropic's SDK and prints what it got as JSON.
//   PACKAGES=dir OPENAI_BASE_URL=… ANTHROPIC_BASE_URL=… node contract.mjs SCENARIO
// Keys come from OPENAI_API_KEY and ANTHROPIC_API_KEY, as the SDKs have it.

import { createRequire } from "node:module";

const require = createRequire(`${process.env.PACKAGES}/`);
const { OpenAI } = require("openai");
const { Anthropic } = require("@anthropic-ai/sdk");

const openai = new OpenAI({ maxRetries: 0 });
const anthropic = new Anthropic({ maxRetries: 0 });
const retrying = { maxRetries: 1 };

const model = "policy";
const user = (content) => [{ role: "user", content }];
const parameters = { type: "object", properties: { q: { type: "string" } }, required: ["q"] };
const described = { name: "search", description: "Look something up." };
const tools = [{ type: "function", function: { ...described, parameters } }];
const itemTools = [{ type: "function", ...described, parameters, strict: false }];
const blockTools = [{ ...described, input_schema: parameters }];
const schema = { type: "object", properties: { sun: { type: "boolean" } }, required: ["sun"], additionalProperties: false };
const asked = (content, more = {}) => ({ model, messages: user(content), ...more });
const askedClaude = (content, more = {}) => ({ model, max_tokens: 64, messages: user(content), ...more });

async function errorOf(promise) {
  try {
    await promise;
  } catch (error) {
    const { name, status, code, param, type, message } = error;
    return { name: error.constructor.name ?? name, status, code, param, type, message };
  }
  throw new Error("nothing was refused");
}

// Aborts at the first text that arrives, and says how the stream ended.
async function leave(stream, textOf) {
  let text = "";
  try {
    for await (const event of stream) {
      text += textOf(event) ?? "";
      if (text) stream.controller.abort();
    }
  } catch (error) {
    return { text, ended: error.constructor.name };
  }
  return { text, ended: "quietly" };
}

const chatText = (chunk) => chunk.choices[0]?.delta?.content;
const claudeText = (event) => event.delta?.text;

const scenarios = {
  chat: () => openai.chat.completions.create(asked("hello")),
  chat_stream: () =>
    openai.chat.completions.stream(asked("hello", { stream_options: { include_usage: true } })).finalChatCompletion(),
  chat_tools: () => openai.chat.completions.create(asked("both", { tools })),
  chat_tools_stream: () => openai.chat.completions.stream(asked("both", { tools })).finalChatCompletion(),
  chat_errors: async () => ({
    refused: await errorOf(openai.chat.completions.create(asked("hello", { logprobs: true, top_logprobs: 2 }))),
    range: await errorOf(openai.chat.completions.create(asked("hello", { temperature: 9, stream: true }))),
    missing: await errorOf(openai.models.retrieve("nobody")),
  }),
  chat_ended: () => errorOf(openai.chat.completions.create(asked("hello"), retrying)),
  chat_retry: () => openai.chat.completions.create(asked("hello"), retrying),
  chat_abort: async () => leave(await openai.chat.completions.create(asked("hello", { stream: true })), chatText),
  chat_parse: () =>
    openai.chat.completions.parse(
      asked("weather", { response_format: { type: "json_schema", json_schema: { name: "weather", strict: true, schema } } }),
    ),
  completion: () => openai.completions.create({ model, prompt: "hello", max_tokens: 4 }),
  models: async () => (await openai.models.list()).data,

  response: () => openai.responses.create({ model, input: "hello" }),
  response_stream: () => openai.responses.stream({ model, input: "hello" }).finalResponse(),
  response_tools: async () => {
    const first = await openai.responses.create({ model, input: "weather", tools: itemTools });
    const call = first.output.find((item) => item.type === "function_call");
    const input = [{ type: "function_call_output", call_id: call.call_id, output: "sunny" }];
    const second = await openai.responses.create({ model, input, tools: itemTools, previous_response_id: first.id });
    return { call, continued: second.previous_response_id === first.id, status: second.status };
  },
  response_error: () => errorOf(openai.responses.create({ model, input: "hello", background: true })),

  message: () => anthropic.messages.create(askedClaude("hello")),
  message_stream: () => anthropic.messages.stream(askedClaude("hello")).finalMessage(),
  message_tools: () => anthropic.messages.create(askedClaude("both", { tools: blockTools })),
  message_tools_stream: () => anthropic.messages.stream(askedClaude("both", { tools: blockTools })).finalMessage(),
  message_errors: async () => ({
    refused: await errorOf(anthropic.messages.create({ model, messages: user("hello") })),
    missing: await errorOf(anthropic.models.retrieve("nobody")),
  }),
  message_ended: () => errorOf(anthropic.messages.create(askedClaude("hello"), retrying)),
  message_retry: () => anthropic.messages.create(askedClaude("hello"), retrying),
  message_abort: async () =>
    leave(await anthropic.messages.create(askedClaude("hello", { stream: true })), claudeText),
  message_count: () => anthropic.messages.countTokens(askedClaude("hello", { max_tokens: undefined })),
};

console.log(JSON.stringify(await scenarios[process.argv[2]]()));

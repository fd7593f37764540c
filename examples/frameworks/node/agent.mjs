// A writer with two tools, one of which fails, and a rewriter, with OpenAI's SDK for Node.
//
// It knows nothing of Agent Lightning. Run it as `agl runner --command "node agent.mjs"`: the SDK finds the model's URL and
// key in its environment, and the last line it prints is the reward. The models it asks for tell who is who: both
// names mean the policy.

import { readFileSync } from "node:fs";
import OpenAI from "openai";

const add = ({ a, b }) => a + b;

const divide = ({ a, b }) => {
  if (b === 0) throw new Error("division by zero");
  return a / b;
};

const numbers = { type: "object", properties: { a: { type: "integer" }, b: { type: "integer" } }, required: ["a", "b"] };

// Without this an error of a tool ends the run. The model is told of it as "Error: …", which counts as failed.
const told = (call) => (given) => {
  try {
    return String(call(given));
  } catch (error) {
    return String(error);
  }
};
const tool = (call, description) => ({
  type: "function",
  function: { name: call.name, description, parameters: numbers, parse: JSON.parse, function: told(call) },
});

const task = JSON.parse(readFileSync("/dev/stdin", "utf8"));
const chats = new OpenAI().chat.completions;
const draft = await chats
  .runTools({
    model: "writer",
    messages: [{ role: "user", content: task.topic }],
    tools: [tool(add, "Add two numbers."), tool(divide, "Divide two numbers.")],
  })
  .finalContent();
const text = await chats.stream({ model: "rewriter", messages: [{ role: "user", content: draft }] }).finalContent();

console.log(JSON.stringify({ reward: Number(text.includes("sea")) }));

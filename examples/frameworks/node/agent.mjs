// A writer with two tools, one of which fails, and a rewriter, with OpenAI's SDK for Node.

import OpenAI from "openai";

const add = ({ a, b }) => a + b;

const divide = ({ a, b }) => {
  if (b === 0) throw new Error("division by zero");
  return a / b;
};

const numbers = { type: "object", properties: { a: { type: "integer" }, b: { type: "integer" } }, required: ["a", "b"] };

// Without this an error of a tool ends the run.
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

const chats = new OpenAI().chat.completions;
const model = "gpt-4o-mini";
const draft = await chats
  .runTools({
    model,
    messages: [
      { role: "system", content: "You are the writer." },
      { role: "user", content: process.argv[2] },
    ],
    tools: [tool(add, "Add two numbers."), tool(divide, "Divide two numbers.")],
  })
  .finalContent();
const messages = [
  { role: "system", content: "You are the rewriter." },
  { role: "user", content: draft },
];
console.log(await chats.stream({ model, messages }).finalContent());

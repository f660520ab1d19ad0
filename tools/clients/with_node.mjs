// Libraries for Node: OpenAI's, Anthropic's, Vercel's ai. A line of JSON for each check, as harness.py prints it.
import OpenAI from "openai";
import Anthropic from "@anthropic-ai/sdk";
import { generateObject, generateText, streamText, tool } from "ai";
import { createOpenAI } from "@ai-sdk/openai";
import { createAnthropic } from "@ai-sdk/anthropic";
import { z } from "zod";

const [url, model] = process.argv.slice(2);
const openai = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
const anthropic = new Anthropic({ baseURL: url, apiKey: "none", maxRetries: 0 });
const vercel = createOpenAI({ baseURL: `${url}/v1`, apiKey: "none" });
const vercelAnthropic = createAnthropic({ baseURL: `${url}/v1`, apiKey: "none" });
const SENTENCE = "Answer in one short sentence: what is the capital of France?";
const SCHEMA = {
  type: "object",
  properties: { city: { type: "string", maxLength: 20 } },
  required: ["city"],
  additionalProperties: false,
};
const City = z.object({ city: z.string().max(20) });
const messages = [{ role: "user", content: SENTENCE }];

function need(condition, what) {
  if (!condition) throw new Error(`found ${JSON.stringify(what)}`);
}

const checks = {
  "openai chat": async () => {
    const reply = await openai.chat.completions.create({ model, messages, max_tokens: 16 });
    need(reply.choices[0].message.content, reply);
  },
  "openai stream": async () => {
    let text = "";
    for await (const chunk of await openai.chat.completions.create({ model, messages, max_tokens: 16, stream: true }))
      text += chunk.choices[0]?.delta?.content ?? "";
    need(text, text);
  },
  "openai tools": async () => {
    const weather = { type: "function", function: { name: "weather", parameters: SCHEMA } };
    const asked = { model, messages, tools: [weather], tool_choice: "required", max_tokens: 200 };
    const reply = await openai.chat.completions.create(asked);
    need("city" in JSON.parse(reply.choices[0].message.tool_calls[0].function.arguments), reply);
  },
  "openai responses": async () => {
    const reply = await openai.responses.create({ model, input: SENTENCE, max_output_tokens: 16 });
    need(reply.output_text, reply);
  },
  "openai responses stream": async () => {
    const stream = openai.responses.stream({ model, input: SENTENCE, max_output_tokens: 100, temperature: 0 });
    const reply = await stream.finalResponse();
    need(reply.output_text && reply.status === "completed", reply);
  },
  "anthropic message": async () => {
    const reply = await anthropic.messages.create({ model, messages, max_tokens: 16 });
    need(reply.content[0].text, reply);
  },
  "anthropic stream": async () => {
    const reply = await anthropic.messages.stream({ model, messages, max_tokens: 16 }).finalMessage();
    need(reply.content[0].text && reply.usage.output_tokens, reply);
  },
  "anthropic tools": async () => {
    const asked = { model, messages, max_tokens: 200, tools: [{ name: "weather", input_schema: SCHEMA }] };
    const reply = await anthropic.messages.create({ ...asked, tool_choice: { type: "any" } });
    need("city" in reply.content.find((block) => block.type === "tool_use").input, reply);
  },
  "ai generateText, by responses": async () => {
    const reply = await generateText({ model: vercel(model), prompt: SENTENCE, maxOutputTokens: 32, maxRetries: 0 });
    need(reply.text, reply.text);
  },
  "ai streamText, by chat": async () => {
    let text = "";
    const asked = { model: vercel.chat(model), prompt: SENTENCE, maxOutputTokens: 32, maxRetries: 0 };
    for await (const part of streamText(asked).textStream) text += part;
    need(text, text);
  },
  "ai generateObject": async () => {
    const asked = { model: vercel(model), schema: City, prompt: SENTENCE, maxOutputTokens: 200, maxRetries: 0 };
    need("city" in (await generateObject(asked)).object, "no city");
  },
  "ai tools": async () => {
    const weather = tool({ description: "Weather", inputSchema: City, execute: async () => "7 C" });
    const asked = { model: vercel(model), tools: { weather }, toolChoice: "required", maxOutputTokens: 200 };
    const reply = await generateText({ ...asked, prompt: "Weather in Oslo?", maxRetries: 0 });
    need(reply.toolResults.length, reply.toolCalls);
  },
  "ai by anthropic": async () => {
    const asked = { model: vercelAnthropic(model), prompt: SENTENCE, maxOutputTokens: 32, maxRetries: 0 };
    need((await generateText(asked)).text, "no text");
  },
};

for (const [check, run] of Object.entries(checks)) {
  let told = null;
  try {
    await run();
  } catch (error) {
    told = `${error.name}: ${error.message}`.replace(/\s+/g, " ").slice(0, 200);
  }
  console.log(JSON.stringify({ check, told }));
}

// One question to a model, streamed: the console passes it on to a gateway with the key given here.
import { csrf } from "/console/static/forms.js";

async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) if (part.startsWith("data: ") && part !== "data: [DONE]") yield JSON.parse(part.slice(6));
  }
}

async function run(form, signal) {
  const answer = form.querySelector("[data-answer]");
  const told = form.querySelector("[data-told]");
  const { key, model, temperature, max_tokens: most, message } = form.elements;
  const began = performance.now();
  let first = null;
  answer.textContent = "";
  told.textContent = "Waiting…";
  const response = await fetch("/console/playground/chat", {
    method: "POST",
    signal,
    headers: { "content-type": "application/json", "x-csrf-token": csrf(), "x-playground-key": key.value },
    body: JSON.stringify({
      model: model.value, temperature: Number(temperature.value), max_tokens: Number(most.value), stream: true,
      stream_options: { include_usage: true }, messages: [{ role: "user", content: message.value }],
    }),
  });
  if (!response.ok) {
    const refused = await response.json().catch(() => ({}));
    told.textContent = refused.error?.message ?? `Status ${response.status}`;
    return;
  }
  let usage = null;
  for await (const event of events(response.body)) {
    if (event.error) { told.textContent = event.error.message; return; }
    const text = event.choices?.[0]?.delta?.content;
    if (text) { first ??= performance.now(); answer.append(text); }
    usage = event.usage ?? usage;
  }
  const seconds = (performance.now() - (first ?? began)) / 1000;
  const parts = [`first token ${Math.round((first ?? performance.now()) - began)} ms`];
  if (usage) parts.push(`${usage.prompt_tokens} + ${usage.completion_tokens} tokens`, `${(usage.completion_tokens / seconds).toFixed(1)} tok/s`);
  told.textContent = parts.join(" · ");
}

export function listenToPlayground() {
  let stop = null;
  document.addEventListener("submit", async (event) => {
    const form = event.target;
    if (!form.matches("[data-playground]")) return;
    event.preventDefault();
    stop?.abort();
    stop = new AbortController();
    form.querySelector("[data-stop]").disabled = false;
    try {
      await run(form, stop.signal);
    } catch (error) {
      form.querySelector("[data-told]").textContent = error.name === "AbortError" ? "Stopped." : "The stream broke off.";
    }
    form.querySelector("[data-stop]").disabled = true;
  });
  document.addEventListener("click", (event) => {
    if (event.target.matches("[data-stop]")) stop?.abort();
  });
}

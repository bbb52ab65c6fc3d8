// A form with `data-api="METHOD /path"` is that call: its fields are the JSON, and what the API
// refuses is shown at the field it names.
import { notice } from "/console/static/notices.js";

export const csrf = () => document.querySelector('meta[name="csrf"]')?.content ?? "";

export async function call(method, path, body) {
  const headers = { "x-csrf-token": csrf() };
  if (body !== undefined) headers["content-type"] = "application/json";
  const answer = await fetch(path, {
    method,
    headers,
    body: body === undefined ? undefined : JSON.stringify(body),
  });
  const data = await answer.json().catch(() => ({}));
  return { ok: answer.ok, status: answer.status, data, error: data.error ?? {} };
}

function fields(form) {
  const found = {};
  for (const field of form.elements) {
    if (!field.name || field.disabled) continue;
    if (field.type === "checkbox" && field.hasAttribute("value")) {
      found[field.name] ??= [];
      if (field.checked) found[field.name].push(field.value);
    } else if (field.type === "checkbox") found[field.name] = field.checked;
    else if (field.value === "") continue;
    else if (field.type === "number") found[field.name] = Number(field.value);
    else found[field.name] = field.value;
  }
  return found;
}

function ask(text) {
  return new Promise((resolve) => {
    const box = document.createElement("dialog");
    const said = document.createElement("p");
    said.textContent = text;
    const row = document.createElement("div");
    row.className = "row";
    const no = Object.assign(document.createElement("button"), { className: "quiet", textContent: "Cancel" });
    const yes = Object.assign(document.createElement("button"), { textContent: "Go on" });
    no.addEventListener("click", () => box.close("no"));
    yes.addEventListener("click", () => box.close("yes"));
    box.addEventListener("close", () => { resolve(box.returnValue === "yes"); box.remove(); });
    row.append(no, yes);
    box.append(said, row);
    document.body.append(box);
    box.showModal();
  });
}

function clearFaults(form) {
  form.querySelectorAll(".fault").forEach((fault) => fault.remove());
  form.querySelectorAll("[aria-invalid]").forEach((field) => field.removeAttribute("aria-invalid"));
}

function showFault(form, { message, param }) {
  const field = param && form.elements[param.split(".")[0]];
  if (!field?.setAttribute) return notice(message ?? "The control plane did not answer.", { bad: true });
  field.setAttribute("aria-invalid", "true");
  const fault = document.createElement("span");
  fault.className = "fault";
  fault.setAttribute("role", "alert");
  fault.textContent = message;
  field.closest("label")?.append(fault);
  field.focus();
}

async function send(form, button) {
  const [method, path] = form.dataset.api.split(" ");
  if (form.dataset.ask && !(await ask(form.dataset.ask))) return;
  clearFaults(form);
  button.disabled = true;
  const answer = await call(method, path, method === "DELETE" ? undefined : fields(form)).catch(() => ({ error: {} }));
  button.disabled = false;
  if (!answer.ok) return showFault(form, answer.error);
  if (form.dataset.show) notice(form.dataset.showSaid ?? "", { keep: answer.data[form.dataset.show] });
  else if (!form.dataset.then) notice("Done.");
  form.reset();
  document.activeElement?.blur();
  if (form.dataset.then) location.assign(form.dataset.then.replace(/\{(\w+)\}/g, (_, name) => encodeURIComponent(answer.data[name])));
  else htmx.trigger(document.getElementById("middle"), "tick");
}

export function listenToForms() {
  document.addEventListener("submit", (event) => {
    const form = event.target;
    if (!form.dataset.api) return;
    event.preventDefault();
    send(form, event.submitter ?? form.querySelector("button"));
  });
}

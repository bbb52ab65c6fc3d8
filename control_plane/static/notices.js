// What happened, told in a corner; what must be kept stays until it is closed.
const STAY_MS = 6000;

export function notice(text, { bad = false, keep = "" } = {}) {
  const place = document.getElementById("notices");
  const box = document.createElement("div");
  box.className = bad ? "notice bad" : "notice";
  box.append(text);
  if (keep) {
    const code = document.createElement("code");
    code.textContent = keep;
    const close = document.createElement("button");
    close.className = "quiet";
    close.textContent = "Close";
    close.addEventListener("click", () => box.remove());
    box.append(code, close);
  } else {
    setTimeout(() => box.remove(), STAY_MS);
  }
  place.append(box);
}

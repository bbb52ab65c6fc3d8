// Signing in and out.
import { call } from "/console/static/forms.js";

export async function signOut() {
  await call("POST", "/admin/logout");
  location.assign("/console/sign-in");
}

export function listenToSignIn() {
  const form = document.querySelector("[data-sign-in]");
  form?.addEventListener("submit", async (event) => {
    event.preventDefault();
    const refused = form.querySelector("[data-refused]");
    const button = form.querySelector("button");
    button.disabled = true;
    const said = Object.fromEntries(new FormData(form));
    const answer = await call("POST", form.dataset.signIn, said).catch(() => ({
      ok: false,
      error: { message: "The control plane does not answer." },
    }));
    button.disabled = false;
    if (answer.ok) return location.assign("/console");
    refused.textContent = answer.error.message ?? "This did not work.";
    refused.hidden = false;
  });
}

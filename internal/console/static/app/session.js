// The dialogs of a session: the key, and the confirmation of a call that a rule asks for.
import { html, useEffect, useRef, useState } from "./html.js";
import * as api from "./api.js";
import { s } from "./strings.js";
import { Dialog } from "./ui.js";
import { line, Quoted } from "./untrusted.js";

// Login asks for a key until one is accepted. It cannot be cancelled: without a key there is nothing to show.
export function Login({ reason, again, onDone }) {
  const [error, setError] = useState("");
  const [busy, setBusy] = useState(false);
  const submit = async (event) => {
    event.preventDefault();
    const form = new FormData(event.target);
    const token = String(form.get("key")).trim();
    setBusy(true);
    setError("");
    try {
      await api.request("GET", "/v1/self", { headers: { Authorization: `Bearer ${token}` }, public: true });
      api.key.set(token, form.get("keep") === "on");
      onDone();
    } catch (problem) {
      setError(problem.status === 401 ? s.login.wrong : problem.message);
      setBusy(false);
    }
  };
  return html`<${Dialog} title=${s.login.title}>
    <form onSubmit=${submit}>
      <p>${again ? s.login.again : s.login.lead}</p>
      ${(error || reason) && html`<p class="problem" role="alert">${error || line(reason, 300)}</p>`}
      ${!isSecureContext && html`<p class="notice warn">${s.session.insecure}</p>`}
      <label>${s.login.key}<input name="key" type="password" autocomplete="current-password" autofocus required spellcheck=${false} /></label>
      <label class="check"><input name="keep" type="checkbox" /> ${s.login.keep}</label>
      <div class="actions"><button class="primary" disabled=${busy}>${s.login.submit}</button></div>
    </form><//>`;
}

const CONFIRM = 60; // seconds that a confirmation is valid

// Confirmation shows what a rule wants a person to see before a call, and agrees at most once.
export function Confirmation({ problem, options, onDone }) {
  const [left, setLeft] = useState(CONFIRM);
  const done = useRef(false);
  useEffect(() => {
    const timer = setInterval(() => setLeft((n) => Math.max(0, n - 1)), 1000);
    return () => clearInterval(timer);
  }, []);
  const finish = (yes) => {
    if (done.current) return;
    done.current = true;
    onDone(yes);
  };
  return html`<${Dialog} title=${s.confirm.title} onClose=${() => finish(false)}>
    <p>${problem.rule ? s.confirm.rule(line(problem.rule)) : line(problem.detail, 400)}</p>
    ${options.what && html`<p><strong>${line(options.what, 500)}</strong></p>`}
    <${Quoted} pre from=${s.tools.asJSON} text=${typeof options.body === "string" ? options.body : JSON.stringify(options.body, null, 2)} />
    <p class="faint">${left ? s.confirm.left(left) : s.confirm.over}</p>
    <div class="actions"><button type="button" class="primary" autofocus disabled=${!left} onClick=${() => finish(true)}>${s.confirm.yes}</button>
      <button type="button" onClick=${() => finish(false)}>${s.cancel}</button></div>
  <//>`;
}

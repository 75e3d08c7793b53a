"""The page at the root of the server: a conversation where the model has a chat template, a text to be
continued where it has none. One file, which loads nothing from elsewhere."""

import json

from headrace.html_page import escape, render_page

STYLE = """
main { display: flex; flex-direction: column; height: 100vh; max-width: 820px; padding-bottom: 20px }
#said { flex: 1; overflow-y: auto; border: 1px solid var(--line); border-radius: 8px; background: var(--card);
  padding: 14px 18px; margin-bottom: 12px }
#said div { white-space: pre-wrap; overflow-wrap: anywhere; margin-bottom: 12px }
#said div.user { background: var(--bar-soft); border-radius: 8px; padding: 8px 12px; margin-left: 15% }
#said div.error { color: #c0392b } #said span.given { color: var(--soft) }
#said:empty::before { content: attr(data-empty); color: var(--soft) }
form { display: grid; grid-template-columns: 1fr auto; gap: 8px }
textarea { font: inherit; color: inherit; background: var(--card); border: 1px solid var(--line);
  border-radius: 8px; padding: 8px 12px; resize: vertical; min-height: 64px }
button { font: inherit; border: 0; border-radius: 8px; background: var(--bar); color: #fff; padding: 0 18px;
  cursor: pointer; min-width: 92px }
fieldset { grid-column: 1 / 3; border: 0; padding: 0; margin: 0; display: flex; flex-wrap: wrap;
  gap: 6px 16px;
  color: var(--soft); align-items: center }
input { font: inherit; color: inherit; background: var(--card); border: 1px solid var(--line);
  border-radius: 5px; width: 74px; padding: 2px 6px }
fieldset button { background: none; color: var(--soft); padding: 2px 6px; min-width: 0; margin-left: auto;
  border: 1px solid var(--line) }
"""

BODY = """
<div id="said" aria-live="polite" data-empty="{empty}"></div>
<form id="form">
<textarea id="text" placeholder="{placeholder}" autofocus aria-label="{placeholder}"></textarea>
<button id="send">{send}</button>
<fieldset>
<label>temperature <input id="temperature" type="number" min="0" max="2" step="0.1" value="0.8"></label>
<label>top p <input id="top_p" type="number" min="0.01" max="1" step="0.01" value="1"></label>
<label>tokens <input id="max_tokens" type="number" min="1" step="1" value="128"></label>
<label>seed <input id="seed" type="number" min="0" step="1" placeholder="any"></label>
<button type="button" id="clear">Clear</button>
</fieldset>
</form>
"""

SCRIPT = """
const chat = __CHAT__, send = __SEND__, find = id => document.getElementById(id);
const said = find("said"), text = find("text"), button = find("send");
let messages = [], going = null;

function show(kind, content) {
  const one = document.createElement("div");
  one.className = kind;
  one.textContent = content;
  said.append(one);
  said.scrollTop = said.scrollHeight;
  return one;
}

async function* events(response) {
  const reader = response.body.getReader(), decoder = new TextDecoder();
  let held = "";
  for (;;) {
    const {done, value} = await reader.read();
    if (done) return;
    held += decoder.decode(value, {stream: true});
    const parts = held.split("\\n\\n");
    held = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: /, "");
      if (data !== "[DONE]") yield JSON.parse(data);
    }
  }
}

function request(prompt) {
  const asked = {stream: true};
  for (const name of ["temperature", "top_p", "max_tokens", "seed"])
    if (find(name).value !== "") asked[name] = Number(find(name).value);
  if (chat) asked.messages = messages; else asked.prompt = prompt;
  return asked;
}

async function answer(prompt) {
  going = new AbortController();
  button.textContent = "Stop";
  const one = show("model", "");
  if (chat) messages.push({role: "user", content: prompt});
  else one.append(Object.assign(document.createElement("span"), {className: "given", textContent: prompt}));
  const tail = one.appendChild(document.createTextNode(""));
  try {
    const response = await fetch(chat ? "v1/chat/completions" : "v1/completions",
      {method: "POST", headers: {"Content-Type": "application/json"},
       body: JSON.stringify(request(prompt)), signal: going.signal});
    if (!response.ok) throw new Error((await response.json()).error.message);
    for await (const event of events(response)) {
      if (event.error) throw new Error(event.error.message);
      const choice = event.choices[0];
      tail.data += (chat ? choice.delta.content : choice.text) || "";
      said.scrollTop = said.scrollHeight;
    }
  } catch (error) {
    if (error.name !== "AbortError") show("error", error.message);
  }
  if (chat && tail.data) messages.push({role: "assistant", content: tail.data});
  else if (chat) messages.pop();
  going = null;
  button.textContent = send;
}

find("form").addEventListener("submit", event => {
  event.preventDefault();
  if (going) return going.abort();
  const prompt = text.value;
  if (chat && !prompt.trim()) return;
  if (chat) { show("user", prompt); text.value = ""; }
  answer(prompt);
});
text.addEventListener("keydown", event => {
  if (event.key === "Enter" && !event.shiftKey) { event.preventDefault(); find("form").requestSubmit(); }
});
find("clear").addEventListener("click", () => {
  if (going) going.abort();
  messages = [];
  said.replaceChildren();
});
"""


def chat(name: str, notice: str, has_template: bool) -> bytes:
    send = "Send" if has_template else "Continue"
    empty = "Nothing said yet."
    placeholder = "Say something" if has_template else "A text to continue"
    body = BODY.format(empty=escape(empty), placeholder=escape(placeholder), send=send)
    script = SCRIPT.replace("__CHAT__", json.dumps(has_template)).replace("__SEND__", json.dumps(send))
    about = "" if has_template else "; its tokenizer has no chat template, so it continues texts"
    return render_page(name, f"A Headrace model, {notice}{about}.", f"{body}<script>{script}</script>", STYLE)

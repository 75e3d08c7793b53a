"""The page at the root of the server: a chat if the model's tokenizer has a chat template, else a text that
the model continues. One file that loads nothing from elsewhere."""

import json

from headrace.html_page import escape, render_page

STYLE = """
main { display: flex; flex-direction: column; height: 100vh; max-width: 820px; padding-bottom: 20px }
#messages { flex: 1; overflow-y: auto; border: 1px solid var(--line); border-radius: 8px;
  background: var(--card); padding: 14px 18px; margin-bottom: 12px }
#messages div { white-space: pre-wrap; overflow-wrap: anywhere; margin-bottom: 12px }
#messages div.user { background: var(--bar-soft); border-radius: 8px; padding: 8px 12px; margin-left: 15% }
#messages div.error { color: #c0392b } #messages span.prompt { color: var(--soft) }
#messages:empty::before { content: attr(data-empty); color: var(--soft) }
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
<div id="messages" aria-live="polite" data-empty="{empty}"></div>
<form id="form">
<textarea id="text" placeholder="{placeholder}" autofocus aria-label="{placeholder}"></textarea>
<button id="send">{send}</button>
<fieldset>
<label>temperature <input id="temperature" type="number" min="0" max="2" step="0.1" value="0.8"></label>
<label>top p <input id="top_p" type="number" min="0.01" max="1" step="0.01" value="1"></label>
<label>max tokens <input id="max_tokens" type="number" min="1" step="1" value="128"></label>
<label>seed <input id="seed" type="number" min="0" step="1" placeholder="random"></label>
<button type="button" id="clear">Clear</button>
</fieldset>
</form>
"""

SCRIPT = """
const isChat = __CHAT__, sendLabel = __SEND__, find = id => document.getElementById(id);
const messageList = find("messages"), text = find("text"), button = find("send");
let chat = [], request = null;  // messages so far; the AbortController of the running request

function show(kind, content) {
  const message = document.createElement("div");
  message.className = kind;
  message.textContent = content;
  messageList.append(message);
  messageList.scrollTop = messageList.scrollHeight;
  return message;
}

async function* readEvents(response) {
  const reader = response.body.getReader(), decoder = new TextDecoder();
  let buffer = "";
  for (;;) {
    const {done, value} = await reader.read();
    if (done) return;
    buffer += decoder.decode(value, {stream: true});
    const events = buffer.split("\\n\\n");
    buffer = events.pop();
    for (const event of events) {
      const data = event.replace(/^data: /, "");
      if (data !== "[DONE]") yield JSON.parse(data);
    }
  }
}

function requestBody(prompt) {
  const body = {stream: true};
  for (const name of ["temperature", "top_p", "max_tokens", "seed"])
    if (find(name).value !== "") body[name] = Number(find(name).value);
  if (isChat) body.messages = chat; else body.prompt = prompt;
  return body;
}

async function generate(prompt) {
  request = new AbortController();
  button.textContent = "Stop";
  const message = show("model", ""), current = chat;  // Clear starts another chat
  if (isChat) chat.push({role: "user", content: prompt});
  else message.append(Object.assign(document.createElement("span"),
                                    {className: "prompt", textContent: prompt}));
  const generated = message.appendChild(document.createTextNode(""));
  try {
    const response = await fetch(isChat ? "v1/chat/completions" : "v1/completions",
      {method: "POST", headers: {"Content-Type": "application/json"},
       body: JSON.stringify(requestBody(prompt)), signal: request.signal});
    if (!response.ok) throw new Error((await response.json()).error.message);
    for await (const event of readEvents(response)) {
      if (event.error) throw new Error(event.error.message);
      const choice = event.choices[0];
      generated.data += (isChat ? choice.delta.content : choice.text) || "";
      messageList.scrollTop = messageList.scrollHeight;
    }
  } catch (error) {
    if (error.name !== "AbortError") show("error", error.message);
  }
  if (isChat && generated.data) current.push({role: "assistant", content: generated.data});
  else if (isChat) current.pop();
  request = null;
  button.textContent = sendLabel;
}

find("form").addEventListener("submit", event => {
  event.preventDefault();
  if (request) return request.abort();
  const prompt = text.value;
  if (isChat && !prompt.trim()) return;
  if (isChat) { show("user", prompt); text.value = ""; }
  generate(prompt);
});
text.addEventListener("keydown", event => {
  if (event.key === "Enter" && !event.shiftKey) { event.preventDefault(); find("form").requestSubmit(); }
});
find("clear").addEventListener("click", () => {
  if (request) request.abort();
  chat = [];
  messageList.replaceChildren();
});
"""


def render_chat_page(model_name: str, notice: str, *, has_template: bool) -> bytes:
    """Render the page. Without a chat template it continues texts."""
    send = "Send" if has_template else "Continue"
    empty = "No messages yet." if has_template else "No text yet."
    placeholder = "Type a message" if has_template else "Type the start of a text"
    body = BODY.format(empty=escape(empty), placeholder=escape(placeholder), send=send)
    script = SCRIPT.replace("__CHAT__", json.dumps(has_template)).replace("__SEND__", json.dumps(send))
    reason = "" if has_template else "; without a chat template, the model continues the text that you type"
    subtitle = f"Served by Headrace {notice}{reason}."
    return render_page(model_name, subtitle, f"{body}<script>{script}</script>", STYLE)

// What stands around every view: the ways to the others, the state of the connection, the keyboard's help, the door.
import type { ComponentType } from "preact";
import { useEffect, useErrorBoundary, useRef, useState } from "preact/hooks";
import type { Contents } from "./api";
import { useKeys } from "./keys";
import { connected, gone } from "./live";
import { Failed, useCurrentInSight } from "./parts";
import { locked, Refused, useGet } from "./request";
import { go, href, place } from "./route";
import { begin, logIn, logOut, session, trouble } from "./session";
import { switchTheme, theme } from "./theme";
import { Backends } from "./views/backends";
import { Chat } from "./views/chat";
import { Group } from "./views/group";
import { Prompts } from "./views/prompts";
import { Quality } from "./views/quality";
import { Resources } from "./views/resources";
import { Rollout } from "./views/rollout";
import { Rollouts } from "./views/rollouts";
import { Runs } from "./views/runs";
import { Workers } from "./views/workers";

interface View {
  name: string;
  path: string;
  key: string;
  view: ComponentType;
  /** Whether there may be something to see; without it there always is. */
  filled?: (contents: Contents | undefined) => boolean;
}

const called = () => session.value?.gateway === true;

const VIEWS: View[] = [
  { name: "Runs", path: "runs", key: "r", view: Runs },
  { name: "Rollouts", path: "rollouts", key: "o", view: Rollouts },
  { name: "Prompts", path: "prompts", key: "p", view: Prompts },
  { name: "Data quality", path: "quality", key: "q", view: Quality },
  { name: "Resources", path: "resources", key: "e", view: Resources, filled: (contents) => contents?.resources !== false },
  { name: "Workers", path: "workers", key: "w", view: Workers, filled: (contents) => contents?.workers !== false },
  { name: "Backends", path: "backends", key: "b", view: Backends, filled: called },
  { name: "Chat", path: "chat", key: "c", view: Chat, filled: called },
];

const CHANGES = ["reset", "metrics", "queued"];

const HELP: [keys: string, meaning: string][] = [
  ...VIEWS.map((one): [string, string] => [`g ${one.key}`, one.name]),
  ["j  k", "Next, previous row or call"],
  ["← →", "Previous, next token"],
  ["Enter", "Open it"],
  ["u", "Back up, to what this is part of"],
  ["1 – 7", "Tabs of a rollout"],
  ["/", "Search"],
  ["t", "Light or dark"],
  ["?", "This help"],
  ["Esc", "Close, or leave a field"],
];

export function Shell() {
  const [help, setHelp] = useState(false);
  useKeys({
    ...Object.fromEntries(VIEWS.map((one) => [`g ${one.key}`, () => go(href([one.path]))])),
    "/": () => document.querySelector<HTMLInputElement>("[type=search]")?.focus(),
    "?": () => setHelp(!help),
    t: switchTheme,
  });
  if (locked.value) return <Door />;
  if (trouble.value) return <Failed message={trouble.value} again={() => void begin()} />;
  if (session.value === null) return null;
  return (
    <div class="shell">
      <a class="skip" href="#content" onClick={skip}>
        Skip to content
      </a>
      <Side />
      <main id="content" tabIndex={-1}>
        {gone.value && (
          <p class="server-gone" role="alert">
            The server of this page has stopped, as it does when its run ends. What was loaded stays here; agl ui shows the
            run again at any time.
          </p>
        )}
        <Content />
      </main>
      {help && <Help close={() => setHelp(false)} />}
    </div>
  );
}

/** The hash names the view, so that it cannot name an element. */
function skip(event: MouseEvent): void {
  event.preventDefault();
  document.getElementById("content")?.focus();
}

function current(): string {
  const first = place.value.path[0] ?? "runs";
  return first === "groups" ? "rollouts" : first;
}

function Content() {
  const [first = "runs", second] = place.value.path;
  const [error, forget] = useErrorBoundary();
  const where = place.value.path.join("/");
  useEffect(forget, [where]);
  if (error) return <Failed message={`This view failed: ${String(error)}`} again={forget} />;
  if (first === "rollouts" && second) return <Rollout key={second} rolloutId={second} />;
  if (first === "groups" && second) return <Group key={second} groupId={second} />;
  const found = VIEWS.find((one) => one.path === first);
  if (!found) return <Failed message={`There is no view “${first}” here.`} again={() => go(href(["runs"]))} />;
  return <found.view />;
}

function Side() {
  const now = session.value;
  const bar = useCurrentInSight(current());
  // Views that are empty are not offered; a link to one shows it all the same.
  const contents = useGet<Contents>("dashboard/contents", (happened) => CHANGES.includes(happened.kind)).data;
  const offered = VIEWS.filter((one) => one.path === current() || one.filled?.(contents) !== false);
  return (
    <nav class="side" aria-label="Views" ref={bar}>
      <a class="brand" href={href(["runs"])}>
        <Bolt />
        Agent Lightning
      </a>
      <ul>
        {offered.map((one) => (
          <li key={one.path}>
            <a href={href([one.path])} aria-current={one.path === current() ? "page" : undefined}>
              {one.name}
              <kbd aria-hidden="true">g {one.key}</kbd>
            </a>
          </li>
        ))}
      </ul>
      <div class="foot">
        <span class={`live ${connected.value ? "on" : "off"}`} role="status">
          <i />
          {connected.value ? "live" : "connecting"}
        </span>
        <button type="button" class="quiet" onClick={switchTheme} title="t">
          {theme.value === "dark" ? "light" : "dark"}
        </button>
        {now?.protected && (
          <button type="button" class="quiet" onClick={() => void logOut()} title={`signed in as ${now.name}`}>
            log out
          </button>
        )}
        <span class="muted version">{now?.version}</span>
      </div>
    </nav>
  );
}

function Bolt() {
  return (
    <svg viewBox="0 0 32 32" width="18" height="18" aria-hidden="true">
      <path d="M18 3 7 18h7l-1 11 12-16h-8z" fill="currentColor" />
    </svg>
  );
}

function Help({ close }: { close: () => void }) {
  const dialog = useRef<HTMLDialogElement>(null);
  useEffect(() => dialog.current?.showModal(), []);
  return (
    <dialog ref={dialog} class="help" aria-label="Keyboard" onClose={close} onClick={close}>
      <h2>Keyboard</h2>
      <dl>
        {HELP.map(([keys, meaning]) => (
          <div key={keys}>
            <dt>
              <kbd>{keys}</kbd>
            </dt>
            <dd>{meaning}</dd>
          </div>
        ))}
      </dl>
      <button type="button" onClick={close}>
        Close
      </button>
    </dialog>
  );
}

function Door() {
  const [problem, setProblem] = useState("");
  const enter = async (event: SubmitEvent) => {
    event.preventDefault();
    const form = event.currentTarget as HTMLFormElement;
    try {
      await logIn(String(new FormData(form).get("key")));
    } catch (error) {
      if (!(error instanceof Refused)) throw error;
      setProblem(error.message);
    }
  };
  return (
    <main class="door">
      <form onSubmit={enter}>
        <h1>
          <Bolt /> Agent Lightning
        </h1>
        <label for="key">Key of this server</label>
        <input id="key" name="key" type="password" autocomplete="current-password" required autofocus />
        {problem && <p role="alert">{problem}</p>}
        <button type="submit" class="main">
          Sign in
        </button>
        <p class="muted">The admin key that the server was started with, or one made with `agl keys issue`.</p>
      </form>
    </main>
  );
}

// What happens in the store, as it happens: one event stream for the whole page, and who is told of what.
import { signal } from "@preact/signals";
import { useEffect, useRef } from "preact/hooks";

export interface Happened {
  kind: "reset" | "rollout" | "spans" | "groups" | "queued" | "metrics";
  rollout_id?: string;
  run_id?: string | null;
  group_id?: string | null;
  status?: string;
}

const KINDS: Happened["kind"][] = ["reset", "rollout", "spans", "groups", "queued", "metrics"];
const listeners = new Set<(happened: Happened) => void>();

export const connected = signal(false);
/** Whether nothing was heard of the server for so long that it has stopped. */
export const gone = signal(false);
const LONG = 4000; // milliseconds
let lost: ReturnType<typeof setTimeout> | undefined;
let stream: EventSource | undefined;

/** Listen from now on. After a break the browser connects again by itself, and `reset` says to read afresh; where the
 * server refused, `refused` is called. */
export function connect(refused: () => void): void {
  stream?.close();
  stream = new EventSource("api/v1/events");
  stream.onerror = () => {
    connected.value = false;
    lost ??= setTimeout(() => (gone.value = true), LONG);
    if (stream?.readyState === EventSource.CLOSED) refused();
  };
  for (const kind of KINDS) {
    stream.addEventListener(kind, (event) => {
      const happened = { kind, ...JSON.parse(event.data) } as Happened;
      connected.value = true; // each stream begins with a `reset`
      gone.value = false;
      clearTimeout(lost);
      lost = undefined;
      for (const told of [...listeners]) told(happened);
    });
  }
}

/** Call `then` when something happened that `matters`, at most once in `pause` milliseconds. */
export function useLive(matters: (happened: Happened) => boolean, then: () => void, pause = 1000): void {
  const latest = useRef({ matters, then });
  latest.current = { matters, then };
  useEffect(() => {
    let waiting: ReturnType<typeof setTimeout> | undefined;
    let last = 0;
    const told = (happened: Happened) => {
      if (waiting !== undefined || !latest.current.matters(happened)) return;
      waiting = setTimeout(
        () => {
          waiting = undefined;
          last = Date.now();
          latest.current.then();
        },
        Math.max(0, last + pause - Date.now()),
      );
    };
    listeners.add(told);
    return () => {
      listeners.delete(told);
      clearTimeout(waiting);
    };
  }, [pause]);
}

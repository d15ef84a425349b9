// Drives the vendor's JavaScript client through one scenario and prints what it saw, as JSON.
//
// node scenarios.mjs NAME, with the server and credentials in the environment and preload.mjs loaded first.
// Works with every version of the client under test; observations mean the same as in the Python driver.
import { randomBytes } from "node:crypto";
import { readdirSync, readFileSync } from "node:fs";
import { Writable } from "node:stream";
import { setTimeout as sleep } from "node:timers/promises";
import * as api from "@vercel/sandbox";

const { APIError, Drive, Sandbox, Snapshot } = api;
const prefix = `ts-${randomBytes(5).toString("hex")}`;
const name = (suffix = "box") => `${prefix}-${suffix}`;

// Sandboxes made by a scenario, deleted at its end whatever happened.
const made = new Set();

async function box(suffix = "box", options = {}) {
  made.add(name(suffix));
  return Sandbox.create({ name: name(suffix), ...options });
}

async function refusal(promise) {
  try {
    await promise;
  } catch (error) {
    if (!(error instanceof APIError)) throw error;
    return [error.response.status, error.json?.error?.code];
  }
  throw new Error("the request succeeded");
}

async function errorOf(promise) {
  try {
    await promise;
  } catch (error) {
    return error;
  }
  return null;
}

async function sh(sandbox, script, options = {}) {
  const done = await sandbox.runCommand({ cmd: "sh", args: ["-c", script], ...options });
  if (done.exitCode !== 0) throw new Error(`exit ${done.exitCode}: ${await done.stderr()}`);
  return done.stdout();
}

const read = async (sandbox, path) => (await sandbox.readFileToBuffer({ path }))?.toString() ?? null;
const write = (sandbox, path, content, mode) => sandbox.writeFiles([{ path, content, mode }]);
const sessionsOf = async (sandbox) => (await sandbox.listSessions()).toArray();
const snapshotsOf = async (sandbox) => (await Snapshot.list({ name: sandbox.name })).toArray();
const ports = (sandbox) => sandbox.routes.map((route) => route.port);
const get = (options = {}) => Sandbox.get({ name: name(), ...options });

// What a sandbox gets from the server on loopback under one of its names; nothing if it is not let.
async function fetched(sandbox, host, path = "/echo", ...options) {
  const url = `http://${host}:${process.env.WEB_PORT}${path}`;
  const done = await sandbox.runCommand("curl", ["-s", "-m", "60", ...options, url]);
  return done.stdout();
}

// What a route leads to, once somebody listens there.
async function through(url, path) {
  for (let attempt = 0; attempt < 600; attempt += 1) {
    const answer = await fetch(`${url}${path}`);
    const text = await answer.text();
    if (answer.status === 200) return text;
    await sleep(100);
  }
  return "";
}

// Ends the process that owns a session, as a machine out of memory might.
function killSupervisor(session) {
  for (const pid of readdirSync("/proc").filter((entry) => /^\d+$/.test(entry))) {
    let line = "";
    try {
      line = readFileSync(`/proc/${pid}/cmdline`, "utf8").split("\0")[0];
    } catch {
      // It has ended since.
    }
    if (line === `sandkeep-supervisor ${session}`) return process.kill(Number(pid), "SIGKILL");
  }
  throw new Error(`no supervisor of ${session}`);
}

const scenarios = {
  // --- creating

  async create_default() {
    const one = await box();
    const { status, persistent, vcpus, memory, timeout, cwd } = one;
    return { status, persistent, vcpus, memory, timeout, ports: ports(one), cwd };
  },

  async create_image() {
    const one = await box("box", { image: "vercel/sandbox/universal" });
    return { status: one.status, image: Boolean(one.image) };
  },

  async create_runtime() {
    const one = await box("box", { runtime: "node24" });
    return { runtime: one.runtime, user: Boolean((await one.getDefaultUser()).username) };
  },

  async create_configured() {
    const one = await box("box", {
      resources: { vcpus: 4 },
      timeout: 120000,
      ports: [3000, 8080],
      tags: { team: "a:b" },
      snapshotExpiration: 86400000,
      keepLastSnapshots: { count: 3, expiration: 604800000 },
      persistent: false,
    });
    const kept = one.keepLastSnapshots;
    return {
      vcpus: one.vcpus,
      memory: one.memory,
      timeout: one.timeout,
      ports: ports(one),
      tags: one.tags,
      snapshotExpiration: one.snapshotExpiration,
      retention: [kept.count, kept.expiration, kept.deleteEvicted],
      persistent: one.persistent,
    };
  },

  async create_from_git() {
    const one = await box("box", { source: { type: "git", url: process.env.GIT_URL } });
    // Older sandboxes clone into the working directory itself, newer ones below it.
    const path = (await sh(one, "dirname $(find /vercel/sandbox -name README.md)")).trim();
    const files = (await sh(one, `ls ${path}`)).split(/\s+/).filter(Boolean);
    return { files, text: await read(one, `${path}/README.md`) };
  },

  async create_from_tarball() {
    const one = await box("box", { source: { type: "tarball", url: process.env.TARBALL_URL } });
    return { text: await sh(one, "find /vercel/sandbox -name hello.txt -exec cat {} +") };
  },

  async create_from_snapshot() {
    const one = await box("one");
    await write(one, "kept.txt", "kept\n");
    const { snapshotId } = await one.snapshot();
    const two = await box("two", { source: { type: "snapshot", snapshotId } });
    return { text: await read(two, "kept.txt"), source: two.sourceSnapshotId === snapshotId };
  },

  async duplicate_name() {
    await box();
    return refusal(box());
  },

  async invalid_create() {
    const many = Array.from({ length: 16 }, (_, index) => 2000 + index);
    return { ports: await refusal(box("box", { ports: many })) };
  },

  async failover_region() {
    return refusal(box("box", { region: "iad1", failoverRegions: ["iad1"] }));
  },

  // --- finding and resuming

  async get_missing() {
    return refusal(get());
  },

  async get_has_no_side_effect() {
    const one = await box();
    await one.stop();
    const before = (await get()).status;
    const after = (await get()).status;
    return { before, after, sessions: (await sessionsOf(one)).length };
  },

  async resume() {
    const one = await box();
    const first = one.currentSession().sessionId;
    await one.stop();
    const fresh = (await get({ resume: true })).currentSession().sessionId;
    const again = await get({ resume: true });
    return {
      fresh: fresh !== first,
      again_same: again.currentSession().sessionId === fresh,
      status: again.status,
    };
  },

  async resume_hook() {
    let calls = 0;
    const onResume = async () => void calls++;
    const one = await box("box", { onResume });
    await one.runCommand("true");
    const running = calls;
    await one.stop();
    await one.runCommand("true");
    await one.runCommand("true");
    return { calls, calls_when_running: running };
  },

  async create_hook() {
    const counts = { created: 0, resumed: 0 };
    const options = {
      name: name(),
      resume: true,
      onCreate: async () => void counts.created++,
      onResume: async () => void counts.resumed++,
    };
    made.add(name());
    const one = await Sandbox.getOrCreate(options);
    const first = { ...counts };
    await one.stop();
    await Sandbox.getOrCreate(options);
    return {
      created: [first.created, counts.created - first.created],
      resumed: [first.resumed, counts.resumed - first.resumed],
    };
  },

  async auto_resume() {
    const one = await box();
    await write(one, "kept.txt", "kept\n");
    await one.stop();
    const text = await read(one, "kept.txt");
    const sessions = await sessionsOf(one);
    return { text, sessions: sessions.length, statuses: sessions.map((session) => session.status) };
  },

  async concurrent_auto_resume() {
    const one = await box();
    await write(one, "kept.txt", "kept\n");
    await one.stop();
    const handles = await Promise.all([1, 2, 3, 4].map(() => get()));
    const texts = await Promise.all(handles.map((handle) => read(handle, "kept.txt")));
    return { texts, sessions: (await sessionsOf(one)).length };
  },

  async read_while_stopping() {
    const one = await box();
    await write(one, "kept.txt", "kept\n");
    const handles = await Promise.all([1, 2, 3, 4].map(() => get()));
    const [, ...texts] = await Promise.all([one.stop(), ...handles.map((handle) => read(handle, "kept.txt"))]);
    return { texts, after: await read(one, "kept.txt") };
  },

  async get_or_create() {
    const missing = await refusal(get());
    made.add(name());
    const first = await Sandbox.getOrCreate({ name: name() });
    const second = await Sandbox.getOrCreate({ name: name() });
    return {
      first_new: missing[0] === 404,
      second_same: first.currentSession().sessionId === second.currentSession().sessionId,
    };
  },

  async get_or_create_after_snapshot_is_gone() {
    const first = await box();
    await write(first, "kept.txt", "kept\n");
    const snapshot = await first.snapshot();
    await snapshot.delete();
    const second = await Sandbox.getOrCreate({ name: name(), resume: true });
    return {
      recreated: second.createdAt.getTime() !== first.createdAt.getTime(),
      file: await second.fs.exists("/vercel/sandbox/kept.txt"),
    };
  },

  async list_sandboxes() {
    await box("a");
    await box("b", { tags: { key: `${prefix}:1` } });
    await box("c");
    const everything = await (await Sandbox.list({ limit: 50 })).toArray();
    const mine = everything.map((one) => one.name).filter((one) => one.startsWith(prefix));
    const byName = { namePrefix: prefix, sortBy: "name", sortOrder: "asc", limit: 1 };
    const pages = [];
    const found = [];
    for await (const page of (await Sandbox.list(byName)).pages()) {
      if (page.sandboxes.length === 0) continue;
      pages.push(page.sandboxes.length);
      found.push(...page.sandboxes.map((one) => one.name));
    }
    const tagged = await (await Sandbox.list({ tags: { key: `${prefix}:1` } })).toArray();
    const last = (one) => one.split("-").at(-1);
    return {
      newest_first: mine.join() === ["c", "b", "a"].map(name).join(),
      pages,
      by_prefix: found.map(last),
      by_tag: tagged.map((one) => last(one.name)),
    };
  },

  // --- changing

  async update() {
    const one = await box("box", { ports: [3000], tags: { a: "1", b: "2" } });
    const session = one.currentSession().sessionId;
    await one.update({ tags: { x: "1" }, ports: [4000], timeout: 600000 });
    const seen = { tags: one.tags, ports: ports(one) };
    await one.update({ resources: { vcpus: 4 }, keepLastSnapshots: { count: 3 }, ports: [] });
    const kept = one.keepLastSnapshots;
    await one.update({ keepLastSnapshots: null, mounts: {} });
    const fresh = await get();
    return {
      ...seen,
      ports_cleared: ports(one),
      timeout: one.timeout,
      vcpus: fresh.vcpus,
      memory: fresh.memory,
      retention: [kept.count, kept.deleteEvicted],
      retention_removed: fresh.keepLastSnapshots === undefined,
      same_session: fresh.currentSession().sessionId === session,
    };
  },

  async extend_by_update() {
    const one = await box();
    await one.update({ timeout: 600000 });
    const fresh = await get();
    return { sandbox: fresh.timeout, session: fresh.currentSession().timeout };
  },

  async delete() {
    const one = await box();
    await one.delete();
    made.delete(name());
    return { after: await refusal(get()) };
  },

  async delete_orphan_snapshots() {
    const one = await box();
    await one.stop();
    const snapshotId = (await get()).currentSnapshotId;
    await one.delete({ deleteOrphanSnapshots: true });
    made.delete(name());
    return { snapshot: (await Snapshot.get({ snapshotId })).status };
  },

  async fork() {
    const source = await box("source", { env: { WHERE: "inherited" }, tags: { from: "source" } });
    await write(source, "kept.txt", "kept\n");
    await source.stop();
    const forkOf = (suffix, options = {}) => {
      made.add(name(suffix));
      return Sandbox.fork({ sourceSandbox: name("source"), name: name(suffix), ...options });
    };
    const copy = await forkOf("fork");
    const other = await forkOf("other", { tags: { only: "mine" } });
    return {
      text: await read(copy, "kept.txt"),
      env: await sh(copy, "echo $WHERE"),
      tags: copy.tags,
      replaced: other.tags,
      missing: await refusal(Sandbox.fork({ sourceSandbox: name("none"), name: name("never") })),
    };
  },

  // --- processes

  async run() {
    const one = await box();
    const done = await one.runCommand("sh", ["-c", "echo 'out é 😀'; echo err >&2; exit 3"]);
    await write(one, "dir/hello.py", "print('python ran')\n");
    const script = await one.runCommand("python", ["dir/hello.py"]);
    return {
      code: done.exitCode,
      stdout: await done.stdout(),
      stderr: await done.stderr(),
      relative_python: await script.stdout(),
    };
  },

  async run_nul_and_invalid() {
    const one = await box();
    return { nul: await sh(one, "printf 'a\\0b\\0'"), invalid: await sh(one, "printf 'x\\377y'") };
  },

  async run_large_output() {
    const one = await box();
    const text = await sh(one, "i=0; while [ $i -lt 3000 ]; do printf '%099d\\n' $i; i=$((i+1)); done");
    const lines = text.split("\n").slice(0, -1);
    return {
      length: text.length,
      lines: lines.length,
      ordered: lines.every((line, index) => parseInt(line, 10) === index),
    };
  },

  async run_background_child() {
    const one = await box();
    const started = Date.now();
    return { stdout: await sh(one, "sleep 120 & echo started"), quick: Date.now() - started < 60000 };
  },

  async run_detached() {
    const one = await box();
    const script = "echo one; sleep 1; echo two; exit 7";
    const command = await one.runCommand({ cmd: "sh", args: ["-c", script], detached: true });
    const running = command.exitCode === null;
    let logs = "";
    for await (const line of command.logs()) logs += line.data;
    const { exitCode: code } = await command.wait();
    const again = await one.getCommand(command.cmdId);
    return { running, code, logs, again: await again.stdout(), by_id: again.exitCode };
  },

  async missing_executable() {
    const one = await box();
    return refusal(one.runCommand("no-such-program"));
  },

  async signals() {
    const one = await box();
    const seen = {};
    for (const signal of ["SIGINT", "SIGTERM", "SIGKILL"]) {
      const command = await one.runCommand({ cmd: "sleep", args: ["60"], detached: true });
      await command.kill(signal);
      seen[signal] = (await command.wait()).exitCode;
    }
    return seen;
  },

  async command_timeout() {
    const one = await box();
    const args = ["-c", "echo before; sleep 100"];
    let code, partial;
    // Longer limits only where the machine was too busy to print anything within the first.
    for (const timeoutMs of [1000, 4000, 16000, 64000]) {
      const done = await one.runCommand({ cmd: "sh", args, timeoutMs });
      [code, partial] = [done.exitCode, await done.stdout()];
      if (partial) break;
    }
    return { code, partial };
  },

  async sudo() {
    const one = await box();
    const plain = (await sh(one, "echo $PATH")).trim();
    const done = await one.runCommand({ cmd: "env", sudo: true });
    const found = Object.fromEntries(
      (await done.stdout()).split("\n").map((line) => [line.split("=")[0], line.split("=").slice(1).join("=")]),
    );
    const uid = await one.runCommand({ cmd: "id", args: ["-u"], sudo: true });
    return {
      uid: (await uid.stdout()).trim(),
      USER: found.USER,
      HOME: found.HOME,
      SUDO_USER: Boolean(found.SUDO_USER) && found.SUDO_USER !== "root",
      path_kept: found.PATH === plain,
      real: (await sh(one, "sudo id -u")).trim(),
    };
  },

  async environment() {
    const one = await box("box", { env: { A: "base", B: "base" } });
    const text = await sh(one, "echo $A $B $C", { env: { B: "mine", C: "2" } });
    const [standard, override, extra] = text.trim().split(" ");
    return { default: standard, override, extra };
  },

  async session_dies_during_a_run() {
    const one = await box();
    await write(one, "kept.txt", "kept\n");
    const session = one.currentSession().sessionId;
    let kill;
    // The first output says that it runs.
    const stdout = new Writable({
      write(chunk, encoding, done) {
        kill ??= killSupervisor(session);
        done();
      },
    });
    const args = ["-c", "echo before; sleep 60"];
    const done = await one.runCommand({ cmd: "sh", args, stdout });
    return { code: done.exitCode, stdout: await done.stdout(), text: await read(one, "kept.txt") };
  },

  // The output ends with an error in place of an exit code.
  async stream_error() {
    const one = await box();
    const failed = await errorOf(one.runCommand("vanish"));
    if (!(failed instanceof api.StreamError)) throw failed ?? new Error("the run succeeded");
    return failed.code;
  },

  // --- files

  async files() {
    const one = await box();
    await write(one, "a/hello.txt", "hello é\n", 0o600);
    await write(one, "empty", "");
    const big = randomBytes(5 << 20);
    await write(one, "big.bin", big);
    await one.mkDir("x");
    await one.mkDir("x/y/z");
    await write(one, "x/y/z/deep.txt", "deep\n");
    await write(one, "again.txt", "first\n");
    await write(one, "again.txt", "second\n");
    const me = (await sh(one, "id -un")).trim();
    const relative = await one.readFileToBuffer({ path: "hello.txt", cwd: "/vercel/sandbox/a" });
    return {
      text: await read(one, "a/hello.txt"),
      empty: await read(one, "empty"),
      mode: (await sh(one, "stat -c %a a/hello.txt")).trim(),
      owner_is_me: (await sh(one, "stat -c %U a/hello.txt")).trim() === me,
      big: big.equals(await one.readFileToBuffer({ path: "big.bin" })),
      nested: await read(one, "/vercel/sandbox/x/y/z/deep.txt"),
      overwritten: await read(one, "again.txt"),
      missing: (await read(one, "none.txt")) === null ? "missing" : "found",
      directory: (await errorOf(read(one, "a"))) !== null,
      onto_root: (await errorOf(write(one, "/vercel/sandbox/a", "x"))) !== null,
      relative: relative.toString(),
    };
  },

  async read_file_missing() {
    const one = await box();
    return {
      stream: await one.readFile({ path: "none" }),
      buffer: await one.readFileToBuffer({ path: "none" }),
    };
  },

  async fs_helpers() {
    const { fs } = await box();
    const h = "/vercel/sandbox/h";
    const code = async (promise) => (await errorOf(promise))?.code ?? "none";
    await fs.mkdir(`${h}/sub`, { recursive: true });
    await fs.writeFile(`${h}/a.txt`, "hello");
    await fs.symlink("a.txt", `${h}/l`);
    const entries = await fs.readdir(h, { withFileTypes: true });
    const kind = (entry) => (entry.isSymbolicLink() ? "link" : entry.isDirectory() ? "dir" : "file");
    const seen = {
      readdir: (await fs.readdir(h)).sort(),
      types: entries.map((entry) => `${entry.name}:${kind(entry)}`).sort(),
      size: (await fs.stat(`${h}/l`)).size,
      link: await fs.readlink(`${h}/l`),
      real: await fs.realpath(`${h}/l`),
      not_empty: await code(fs.rmdir(h)),
      missing: await code(fs.stat(`${h}/none`)),
      exists: await code(fs.symlink("a.txt", `${h}/l`)),
    };
    await fs.chmod(`${h}/a.txt`, 0o755);
    const mode = ((await fs.stat(`${h}/a.txt`)).mode & 0o777).toString(8);
    await fs.copyFile(`${h}/a.txt`, `${h}/copy`);
    await fs.appendFile(`${h}/a.txt`, "more");
    const appended = await fs.readFile(`${h}/a.txt`, "utf8");
    await fs.rename(`${h}/a.txt`, `${h}/b.txt`);
    await fs.truncate(`${h}/b.txt`, 2);
    const temporary = await fs.mkdtemp("/tmp/t-");
    return {
      ...seen,
      mode,
      appended,
      copied: await fs.readFile(`${h}/copy`, "utf8"),
      renamed: !(await fs.exists(`${h}/a.txt`)),
      truncated: await fs.readFile(`${h}/b.txt`, "utf8"),
      temporary: temporary.startsWith("/tmp/t-"),
    };
  },

  async users() {
    const one = await box();
    const alice = await one.createUser("alice");
    const bob = await one.createUser("bob");
    const who = await alice.runCommand("whoami");
    await alice.writeFiles([{ path: "secret.txt", content: "secret\n" }]);
    const peek = await bob.runCommand("cat", ["/home/alice/secret.txt"]);
    const again = await errorOf(one.createUser("alice"));
    return {
      who: (await who.stdout()).trim(),
      home: alice.homeDir,
      own: (await alice.readFileToBuffer({ path: "secret.txt" })).toString(),
      isolated: peek.exitCode !== 0,
      duplicate: again instanceof api.SandboxUserAlreadyExistsError,
    };
  },

  async groups() {
    const one = await box();
    const alice = await one.createUser("alice");
    const { sharedDir } = await one.createGroup("devs");
    const touch = async () => (await alice.runCommand("touch", [`${sharedDir}/file`])).exitCode === 0;
    await one.addUserToGroup("alice", "devs");
    const can = await touch();
    await one.removeUserFromGroup("alice", "devs");
    return { shared: sharedDir, can, cannot: !(await touch()) };
  },

  async interactive_url() {
    const one = await box();
    const { url, token } = await one.openInteractive();
    return { url: /^wss?:/.test(url), token: token.length > 0, query: url.includes("?") };
  },

  // --- stopping and snapshots

  async stop_is_idempotent() {
    const one = await box();
    const session = one.currentSession();
    const first = await session.stop();
    const second = await session.stop();
    return {
      statuses: [first.session.status, second.session.status],
      snapshot: (await get()).currentSnapshotId !== undefined && first.snapshot?.status === "created",
    };
  },

  async stop_without_persistence() {
    const one = await box("box", { persistent: false });
    await write(one, "kept.txt", "kept\n");
    const stopped = await one.stop();
    return {
      snapshot: stopped.snapshot !== undefined || (await get()).currentSnapshotId !== undefined,
      file: await one.fs.exists("/vercel/sandbox/kept.txt"),
    };
  },

  async timeout_expiry() {
    const one = await box("box", { timeout: 3000 });
    await write(one, "kept.txt", "kept\n");
    let status = "running";
    for (const end = Date.now() + 60000; !["stopped", "failed", "aborted"].includes(status); ) {
      if (Date.now() > end) break;
      await sleep(500);
      status = (await get()).status;
    }
    return { status, text: await read(one, "kept.txt") };
  },

  async extend() {
    const one = await box();
    const before = one.currentSession().timeout;
    await one.extendTimeout(60000);
    const grew = one.currentSession().timeout - before;
    return { grew, too_far: await refusal(one.extendTimeout(5 * 86400000)) };
  },

  async snapshot_twice() {
    const one = await box();
    const first = await one.snapshot({ expiration: 0 });
    const second = await one.snapshot({ expiration: 86400000 });
    return {
      different: first.snapshotId !== second.snapshotId,
      statuses: [first.status, second.status],
      never: first.expiresAt === undefined,
      dated: Math.abs(second.expiresAt.getTime() - Date.now() - 86400000) < 120000,
    };
  },

  async snapshots() {
    const one = await box();
    const first = await one.snapshot();
    const second = await one.snapshot();
    const listed = await snapshotsOf(one);
    const got = await Snapshot.get({ snapshotId: first.snapshotId });
    const before = got.status;
    await got.delete();
    return {
      listed: listed.length,
      got: before,
      deleted: got.status,
      tombstone: (await Snapshot.get({ snapshotId: first.snapshotId })).status,
      parent: listed.find((row) => row.id === second.snapshotId)?.parentId === first.snapshotId,
    };
  },

  async snapshot_tree() {
    const one = await box();
    const ids = [];
    for (let index = 0; index < 3; index++) ids.push((await one.snapshot()).snapshotId);
    const walk = (snapshotId, sortOrder) => Snapshot.tree({ snapshotId, sortOrder, limit: 10 });
    const up = await walk(ids[2], "desc");
    const down = await walk(ids[0], "asc");
    const nodes = [...up.snapshots, ...down.snapshots];
    return {
      ancestors: up.snapshots.length,
      descendants: down.snapshots.length,
      root: up.pagination.next === null && up.snapshots.at(-1).snapshot.parentId === undefined,
      counts: nodes.every((node) => /^\d+\+?$/.test(node.count)),
    };
  },

  async retention() {
    const one = await box("box", { keepLastSnapshots: { count: 2 } });
    for (let index = 0; index < 4; index++) await one.snapshot();
    // An old snapshot goes once the newer ones would survive a power failure, moments later.
    let kept = 4;
    for (const end = Date.now() + 60000; kept > 2 && Date.now() < end; await sleep(200)) {
      kept = (await snapshotsOf(one)).filter((row) => row.status === "created").length;
    }
    return { kept };
  },

  async rollback() {
    const one = await box();
    await write(one, "state.txt", "first\n");
    const { snapshotId } = await one.snapshot();
    await write(one, "state.txt", "second\n");
    await one.stop();
    await one.update({ currentSnapshotId: snapshotId });
    return {
      text: await read(one, "state.txt"),
      unknown: await refusal(one.update({ currentSnapshotId: "snap_unknown" })),
    };
  },

  async sessions() {
    const one = await box();
    await one.stop();
    await one.runCommand("true");
    const found = await sessionsOf(one);
    const sources = new Set(found.map((session) => session.sourceSandboxName));
    return { count: found.length, one_source: sources.size === 1 && sources.has(one.name) };
  },

  // --- network and drives

  async network_policy() {
    const rule = {
      match: { path: { startsWith: "/v1/" }, method: ["POST"] },
      transform: [{ headers: { authorization: "hunter2" } }],
    };
    const subnets = { allow: ["10.0.0.0/8"], deny: ["10.1.0.0/16"] };
    const open = await box("open");
    const shut = await box("shut", { networkPolicy: "deny-all" });
    const simple = [open.networkPolicy, shut.networkPolicy];
    const live = await open.updateNetworkPolicy("deny-all");
    const fresh = await Sandbox.get({ name: name("open") });
    const listed = await box("listed", { networkPolicy: { allow: ["example.com", "api.x.com"], subnets } });
    const ruled = await box("ruled", {
      networkPolicy: { allow: { "example.com": [], "api.x.com": [rule] }, subnets },
    });
    if (listed.networkPolicy.allow.join() !== Object.keys(ruled.networkPolicy.allow).join()) {
      throw new Error("the list form and the map form name different domains");
    }
    return {
      simple,
      domains: Object.keys(ruled.networkPolicy.allow),
      subnets: [ruled.networkPolicy.subnets.allow, ruled.networkPolicy.subnets.deny],
      secret_shown: JSON.stringify(ruled.networkPolicy).includes("hunter2"),
      live: typeof live === "string" ? live : open.currentSession().networkPolicy,
      default_kept: fresh.networkPolicy,
    };
  },

  async policy_of_domains() {
    const one = await box("box", { networkPolicy: { allow: ["one.test"] } });
    const seen = { allowed: await fetched(one, "one.test"), other: await fetched(one, "two.test") };
    await one.updateNetworkPolicy({ allow: ["one.test"], subnets: { deny: ["127.0.0.0/8"] } });
    seen.denied_range = await fetched(one, "one.test");
    await one.updateNetworkPolicy("deny-all");
    return { ...seen, live: await fetched(one, "one.test") };
  },

  async policy_of_requests() {
    const rule = {
      match: { path: { startsWith: "/echo/v1" } },
      transform: [{ headers: { "x-injected": "by the policy" } }],
    };
    const one = await box("box", { networkPolicy: { allow: { "one.test": [rule] } } });
    return {
      matched: await fetched(one, "one.test", "/echo/v1"),
      other: await fetched(one, "one.test", "/echo/v2"),
    };
  },

  async policy_answers() {
    const response = { statusCode: 418, body: "no tea", contentType: "text/plain" };
    const rule = { match: { path: { exact: "/tea" } }, response };
    const one = await box("box", { networkPolicy: { allow: { "one.test": [rule] } } });
    return {
      answer: await fetched(one, "one.test", "/tea", "-w", " %{http_code}"),
      other: await fetched(one, "one.test"),
    };
  },

  async routes() {
    const one = await box("box", { ports: [3000] });
    await sh(one, "echo 'through the route' > page");
    await one.runCommand({ cmd: "python3", args: ["-m", "http.server", "3000"], detached: true });
    return {
      ports: ports(one),
      urls: one.routes.every((route) => route.url.startsWith("http") && route.subdomain),
      text: await through(one.routes[0].url, "/page"),
    };
  },

  async drives() {
    const drive = await Drive.getOrCreate({ name: name("drive") });
    const again = await Drive.getOrCreate({ name: name("drive") });
    const listed = await (await Drive.list({ namePrefix: prefix, sortBy: "name" })).toArray();
    const one = await box("one", { mounts: { "/data": drive } });
    await sh(one, "echo 'on the drive' > /data/file");
    const attached = await refusal(box("two", { mounts: { "/data": again } }));
    await one.stop();
    const three = await box("three", { mounts: { "/data": drive.snapshot() } });
    const text = await sh(three, "cat /data/file");
    await cleanUp();
    await again.delete();
    const left = await (await Drive.list({ namePrefix: prefix, sortBy: "name" })).toArray();
    return {
      created: drive.name === name("drive"),
      again_same: again.driveId === drive.driveId,
      listed: listed.length === 1,
      text,
      attached,
      deleted: left.length === 0,
    };
  },
};

async function cleanUp() {
  for (const one of made) {
    try {
      await (await Sandbox.get({ name: one })).delete({ deleteOrphanSnapshots: true });
    } catch {
      // It may never have been created, or be gone already.
    }
  }
  made.clear();
}

try {
  const observed = await scenarios[process.argv[2]]();
  await cleanUp();
  console.log(JSON.stringify(observed));
} catch (error) {
  await cleanUp();
  console.error(error, error?.json ?? "");
  process.exitCode = 1;
}

package main

import (
	"context"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"fleetd/internal/audit"
	"fleetd/internal/credential"
)

func TestKeysCreate(t *testing.T) {
	f := newAPI(t, map[string]string{
		"POST /v1/keys": `{"id":"abcdefgh","name":"lab","scopes":["tools:call"],"state":"valid","created":"2026-08-01T12:00:00.000Z","expires":"2026-08-31T12:00:00.000Z","revoked":null,"token":"fld_abcdefgh_x"}`,
	})
	f.run("keys", "create", "--name", "lab", "--scope", "tools:call,devices:read", "--devices", "room=lab,floor=1", "--tools", "*get_*,self.lamp.*", "--expires", "720h").is(t, exitOK,
		"fld_abcdefgh_x\n", "fleetd: key abcdefgh (lab) expires 2026-08-31T12:00:00Z; its token is not shown again\n")
	want := `POST /v1/keys {"name":"lab","scopes":["tools:call","devices:read"],"devices":"room=lab,floor=1","tools":["*get_*","self.lamp.*"],"expires":"2026-08-31T12:00:00Z"}`
	if asked := f.requests(); len(asked) != 1 || asked[0] != want {
		t.Errorf("asked %q\nwant  %q", asked, want)
	}
	f.run("keys", "create", "--name", "lab", "--scope", "admin", "--expires", "2027-01-31")
	if asked := f.requests(); !strings.HasSuffix(asked[len(asked)-1], `"expires":"2027-01-31T00:00:00Z"}`) {
		t.Errorf("asked %q", asked)
	}
	for _, args := range [][]string{{"--expires", "soon"}, {"--devices", "room="}, {"--devices", "room in lab"}, {"--expires", "-5h"}} {
		if got := f.run(append([]string{"keys", "create", "--name", "x", "--scope", "admin"}, args...)...); got.code != exitFailed || got.stdout != "" {
			t.Errorf("%v: %+v", args, got)
		}
	}
}

func TestKeysListAndRevoke(t *testing.T) {
	f := newAPI(t, map[string]string{
		"GET /v1/keys?limit=1000": `{"items":[{"id":"abcdefgh","name":"lab","scopes":["tools:call"],"devices":{"room":"lab"},"tools":["*get_*"],"state":"revoked","expires":null},
			{"id":"cccccccc","name":"new","scopes":["audio"],"devices":"room!=lab","tools":[],"state":"valid","expires":null},
			{"id":"dddddddd","name":"dev","scopes":["audio"],"devices":"room~lab","tools":[],"state":"valid","expires":null},
			{"id":"bbbbbbbb","name":"all","scopes":["admin"],"devices":{},"tools":[],"state":"valid","expires":"2027-01-01T00:00:00.000Z"}],"next_cursor":""}`,
		"DELETE /v1/keys/lab": "",
	})
	f.run("keys", "list").is(t, exitOK, strings.Join([]string{
		"ID        NAME  STATE    SCOPES      DEVICES    TOOLS   EXPIRES               USED  ADDRESS",
		"abcdefgh  lab   revoked  tools:call  room=lab   *get_*  never                 -     -",
		"cccccccc  new   valid    audio       room!=lab  all     never                 -     -",
		"dddddddd  dev   valid    audio       room~lab   all     never                 -     -", // of a newer server
		"bbbbbbbb  all   valid    admin       all        all     2027-01-01T00:00:00Z  -     -",
		"",
	}, "\n"), "")
	if got := f.run("keys", "list", "--json"); strings.Count(got.stdout, "\n") != 4 || got.code != exitOK {
		t.Errorf("%+v", got)
	}
	f.run("keys", "revoke", "lab").is(t, exitOK, "lab revoked\n", "")
}

// A grant is listed with its host, shown with its last use, and ended by its id.
func TestGrants(t *testing.T) {
	const grant = `{"id":"abcdefgh","name":"grant abcdefgh","scopes":["devices:read","tools:call"],"devices":{},"tools":[],"state":"valid","created":"2026-08-01T11:00:00Z","expires":null,"revoked":null,"parent":"bbbbbbbb","created_by":"lab",
		"grant":{"host":"claude.ai","name":"Cl\u001baude","registered":true,"resource":"/mcp","used":"2026-08-01T11:30:00Z","address":"192.0.2.7"}}`
	f := newAPI(t, map[string]string{
		"GET /v1/keys?limit=1000":  `{"items":[` + grant + `],"next_cursor":""}`,
		"GET /v1/keys/abcdefgh":    grant,
		"DELETE /v1/keys/abcdefgh": "",
		"POST /v1/console/codes":   `{"code":"abc.def","expires":"2026-08-01T12:05:00Z"}`,
	})
	if got := f.run("keys"); got.code != exitOK || !strings.Contains(got.stdout, "abcdefgh  grant abcdefgh of claude.ai  valid") || !strings.Contains(got.stdout, "  never    2026-08-01T11:30:00Z  192.0.2.7\n") {
		t.Errorf("%+v", got)
	}
	got := f.run("keys", "show", "abcdefgh")
	for _, want := range []string{"claude.ai (unverified)", "Opens", "/mcp", "192.0.2.7", "lab"} {
		if !strings.Contains(got.stdout, want) {
			t.Errorf("no %q in\n%s", want, got.stdout)
		}
	}
	if strings.Contains(got.stdout, "\x1b") {
		t.Errorf("%q", got.stdout)
	}
	f.run("keys", "revoke", "abcdefgh").is(t, exitOK, "abcdefgh revoked\n", "")
	f.run("keys", "allow", "--scope", "devices:read", "--devices", "room=lab", "--tools", "self.get_*").is(t, exitOK, "abc.def\n",
		"fleetd: enter this code on the page on which the application asks; it works once, within 5 minutes\n")
	if asked := f.requests(); asked[len(asked)-1] != `POST /v1/console/codes {"for":"consent","scopes":["devices:read"],"devices":"room=lab","tools":["self.get_*"]}` {
		t.Errorf("%q", asked[len(asked)-1])
	}
	if got := f.run("keys", "allow", "--devices", "room in lab"); got.code != exitFailed {
		t.Errorf("%+v", got)
	}
}

func TestPolicyCommands(t *testing.T) {
	const document = `{"version":3,"rules":[{"name":"quiet","tools":["self.audio_speaker.*"],"devices":{"room":"bedroom"},"via":["mcp"],"action":"deny"}],
		"reads":[{"tools":["*get_*"],"ttl":"2s"}],"urls":[{"tools":["self.upgrade_firmware"],"prefixes":["https://fw.example.com/"]}],"audit_arguments":["*set_volume"],
		"changed":"2026-08-01T12:00:00Z","by":"desk"}`
	f := newAPI(t, map[string]string{
		"GET /v1/policy":                document,
		"PUT /v1/policy?base_version=3": `{"version":4,"rules":[{"name":"a","action":"deny"}],"warnings":["rule \"a\": no known tool matches \"x\""]}`,
		"PUT /v1/policy?base_version=2": `{"status":400,"code":"bad_request","detail":"the policy is at version 3, not 2"}`,
		"GET /v1/policy/explain?arguments=%7B%22url%22%3A%22http%3A%2F%2Fx%2F%22%2C%22volume%22%3A5%7D&device=d&key=lab&tool=t&via=mcp": `{"action":"deny","rule":"policy:quiet","detail":"no","shared":true,"ttl":"2s",
			"steps":[{"rule":"scope","verdict":"passed","why":"has it"},{"rule":"policy:quiet","action":"deny","verdict":"decided","why":"no"},{"rule":"builtin:allow","action":"allow","verdict":"not reached"}]}`,
		"GET /v1/policy/versions?limit=1000": `{"items":[{"version":2,"changed":"2026-08-01T12:00:00Z","by":"desk","rules":5}],"next_cursor":""}`,
	})
	f.status["PUT /v1/policy?base_version=2"] = 400
	f.run("policy", "show").is(t, exitOK, strings.Join([]string{
		"version 3, written 2026-08-01T12:00:00Z by desk",
		"RULE   ACTION  TOOLS                 DEVICES       KEYS  VIA",
		"quiet  deny    self.audio_speaker.*  room=bedroom  any   mcp",
		"reads  *get_*  devices all  kept for 2s",
		"urls   self.upgrade_firmware  https://fw.example.com/",
		"arguments kept in the audit: *set_volume",
		"",
	}, "\n"), "")
	const misspelt = "warning: rule \"a\": no known tool matches \"x\"; check the spelling, or go on if the tool is still to come\n"
	file := filepath.Join(t.TempDir(), "policy.json")
	for text, want := range map[string]outcome{
		`{"rules":[{"name":"a","action":"deny"}]}`: {exitOK, "version 4 with 1 rules is in force\n", misspelt},
		`{"version":3,"rules":[]}`:                 {exitOK, "version 4 with 1 rules is in force\n", misspelt},
		`{"version":2}`:                            {exitRefused, "", "fleetd: the policy is at version 3, not 2 (bad_request)\n"},
		`rules`:                                    {exitFailed, "", "fleetd: the policy is not JSON: invalid character 'r' looking for beginning of value\n"},
	} {
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		f.run("policy", "set", file).is(t, want.code, want.stdout, want.stderr)
	}
	f.run("policy", "explain", "lab", "d", "t", "--via", "mcp", "url=http://x/", "volume=5").is(t, exitOK, strings.Join([]string{
		"deny by policy:quiet",
		"no",
		"identical calls at the same time share one answer, which is kept for 2s",
		"RULE           ACTION  VERDICT      WHY",
		"scope          -       passed       has it",
		"policy:quiet   deny    decided      no",
		"builtin:allow  allow   not reached  -",
		"",
	}, "\n"), "")
	f.run("policy", "versions").is(t, exitOK, "VERSION  CHANGED               BY    RULES\n2        2026-08-01T12:00:00Z  desk  5\n", "")
	f.run("policy", "versions", "--json").is(t, exitOK, `{"version":2,"changed":"2026-08-01T12:00:00Z","by":"desk","rules":5}`+"\n", "")
}

func TestAuditShow(t *testing.T) {
	f := newAPI(t, map[string]string{
		"GET /v1/audit?action=self.reboot&device=d&limit=3&outcome=forbidden&since=2026-08-01T11%3A00%3A00Z": `{"items":[
			{"run":"r","node":"n","seq":2,"at":"2026-08-01T11:59:01Z","kind":"call","action":"self.reboot","device":"d","key":"k","name":"lab","via":"rest","outcome":"forbidden","rule":"key-tools","detail":"no","duration_ns":1500000},
			{"run":"r","node":"n","seq":1,"at":"2026-08-01T11:59:00Z","kind":"refusal","action":"GET /x","outcome":"unauthorized","count":7},
			{"run":"r","node":"n","seq":0,"at":"2026-08-01T11:58:00Z","kind":"run","action":"start","outcome":"ok"}],"next_cursor":"more"}`,
	})
	f.run("audit", "--since", "1h", "--device", "d", "--outcome", "forbidden", "--tool", "self.reboot", "--limit", "2").is(t, exitOK, strings.Join([]string{
		"2026-08-01T11:59:00.000Z  refusal   -                  -                 -        GET /x  unauthorized ×7",
		"2026-08-01T11:59:01.000Z  call      d                  lab               rest     self.reboot  forbidden by key-tools 1.5ms  no",
		"",
	}, "\n"), "fleetd: only the newest 2 entries; --limit shows more, and --until older ones\n")
	if got := f.run("audit", "--since", "soon"); got.code != exitFailed {
		t.Errorf("%+v", got)
	}
}

// blocks makes a short run and its export.
func blocks(t *testing.T, key []byte) []byte {
	t.Helper()
	at := time.Date(2026, 8, 1, 0, 0, 0, 0, time.UTC)
	var out []byte
	var previous audit.Hash
	for i, text := range []string{`{"seq":1,"kind":"run","action":"start","outcome":"ok"}`, `{"seq":2,"kind":"call","action":"t","outcome":"ok"}`, `{"seq":3,"kind":"run","action":"stop","outcome":"ok"}`} {
		b := audit.Block{Run: "r", Node: "n", FirstSeq: int64(i + 1), LastSeq: int64(i + 1), FirstAt: at, LastAt: at, Entries: []byte(text + "\n"), Previous: previous}
		b.Hash = b.Sum(key)
		previous = b.Hash
		out = audit.AppendExport(out, &b)
	}
	return out
}

func TestAuditExportAndVerify(t *testing.T) {
	const secret = "a secret for tests only"
	mint, err := credential.New([]byte(secret))
	if err != nil {
		t.Fatal(err)
	}
	export := string(blocks(t, mint.AuditKey()))
	f := newAPI(t, map[string]string{
		"GET /v1/audit/export": export,
		"GET /v1/audit/verify": `{"intact":false,"runs":2,"blocks":3,"entries":4,"dropped":5,"headless":1,"unended":["run x"],"faults":["gone"]}`,
	})
	dir := t.TempDir()
	file := filepath.Join(dir, "audit.jsonl")
	if err := os.WriteFile(filepath.Join(dir, "secret"), []byte(secret), 0o600); err != nil {
		t.Fatal(err)
	}
	if got := f.run("audit", "export", file); got.code != exitOK {
		t.Fatalf("%+v", got)
	}
	if got := f.run("audit", "export", file); got.code != exitFailed { // it is there already
		t.Errorf("%+v", got)
	}
	f.run("audit", "export", "-").is(t, exitOK, export, "")
	const whole = "3 entries in 3 blocks of 1 runs\nnothing is missing between the blocks, and none was changed\n"
	f.run("audit", "verify", file, "--data-dir", dir).is(t, exitOK, whole, "")
	if err := os.WriteFile(file, []byte(strings.Replace(export, `"action":"t"`, `"action":"u"`, 1)), 0o600); err != nil {
		t.Fatal(err)
	}
	// security: R4
	f.run("audit", "verify", file, "--data-dir", dir).is(t, exitFailed, "3 entries in 3 blocks of 1 runs\nfault: run r of node n, entries 2 to 2 are not verifiable: they were modified, or written without the fleet's key\n", "fleetd: the audit log is incomplete or was modified\n")
	if got := f.run("audit", "verify", "--json"); got.code != exitFailed || !strings.Contains(got.stdout, `"intact": false`) || !strings.HasPrefix(got.stderr, `{"error":"the audit log is incomplete`) {
		t.Errorf("as JSON: %+v", got)
	}
	f.run("audit", "verify").is(t, exitFailed, "4 entries in 3 blocks of 2 runs\n1 runs begin before this part of the audit\n5 entries were dropped while the database was away, as the nodes recorded\nno end: run x\nfault: gone\n",
		"fleetd: the audit log is incomplete or was modified\n")
}

// A record under the fleet's key is checked with its secret, from the data
// directory or a file, and is not taken for whole without it.
func TestAuditVerifyWithTheKey(t *testing.T) {
	const secret = "a secret for tests only"
	mint, err := credential.New([]byte(secret))
	if err != nil {
		t.Fatal(err)
	}
	store := &keptBlocks{}
	log := audit.New(audit.Options{Node: "n", Version: "1", Key: mint.AuditKey(), Store: store, Log: slog.New(slog.DiscardHandler)})
	if err := log.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	file, keep := filepath.Join(dir, "audit.jsonl"), filepath.Join(dir, "secret")
	for name, content := range map[string][]byte{file: store.export, keep: []byte(secret + "\n"), filepath.Join(dir, "other"): []byte("another secret than that\n")} {
		if err := os.WriteFile(name, content, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	f := newAPI(t, nil)
	for _, args := range [][]string{{"--data-dir", dir}, {"--secret-file", keep}} {
		if got := f.run(append([]string{"audit", "verify", file}, args...)...); got.code != exitOK {
			t.Errorf("%v: %+v", args, got)
		}
	}
	if got := f.run("audit", "verify", file, "--data-dir", filepath.Join(dir, "none")); got.code != exitFailed || !strings.Contains(got.stderr, "--secret-file") {
		t.Errorf("without the secret: %+v", got)
	}
	if got := f.run("audit", "verify", file, "--secret-file", filepath.Join(dir, "other")); got.code != exitFailed || !strings.Contains(got.stdout, "not verifiable") {
		t.Errorf("with another secret: %+v", got)
	}
}

// keptBlocks is a store that exports what it gets.
type keptBlocks struct{ export []byte }

func (k *keptBlocks) SaveAuditBlock(_ context.Context, b *audit.Block) error {
	k.export = audit.AppendExport(k.export, b)
	return nil
}

// A call that needs a yes gets one from --yes or from a person, and from nobody else.
func TestCallConfirmation(t *testing.T) {
	const call = "POST /v1/devices/d/tools/self.reboot/call"
	f := newAPI(t, map[string]string{
		call: `{"status":428,"code":"confirmation_required","detail":"needs a yes","rule":"policy:ask","confirmation":"C0NF"}`,
	})
	f.status[call] = 428
	f.run("call", "d", "self.reboot").is(t, exitRefused, "", "fleetd: the call of self.reboot on d needs a yes (rule policy:ask); nothing was done: add --yes to confirm it\n")
	if asked := f.requests(); len(asked) != 1 {
		t.Errorf("%q", asked)
	}
	f.run("call", "d", "self.reboot", "--yes")
	if asked := f.requests(); len(asked) != 3 || asked[2] != call+` {"arguments":{},"confirmation":"C0NF"}` {
		t.Errorf("%q", asked)
	}
	for answer, requests := range map[string]int{"y\n": 2, "YES\n": 2, "n\n": 1, "\n": 1, "": 1} {
		before := len(f.requests())
		a, _, stderr := newApp()
		a.environ = []string{"FLEETD_API=" + f.url, "FLEETD_TOKEN=t0ken"}
		a.stdin, a.interactive = strings.NewReader(answer), true
		if code := a.run(context.Background(), []string{"call", "d", "self.reboot"}); code != exitRefused {
			t.Errorf("%q: status %d", answer, code)
		}
		if !strings.HasPrefix(stderr.String(), "Call self.reboot on d? The rule policy:ask requires a confirmation. [y/N] ") {
			t.Errorf("%q: %s", answer, stderr.String())
		}
		if n := len(f.requests()) - before; n != requests {
			t.Errorf("%q: %d requests", answer, n)
		}
	}
	denied := newAPI(t, map[string]string{call: `{"status":403,"code":"tool_denied","detail":"not for you","rule":"policy:quiet"}`})
	denied.status[call] = 403
	denied.run("call", "d", "self.reboot").is(t, exitRefused, "", "fleetd: not for you (tool_denied, rule policy:quiet)\n")
}

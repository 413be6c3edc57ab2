package node

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"fleetd/internal/access"
	"fleetd/internal/audit"
	"fleetd/internal/datadir"
	"fleetd/internal/devices"
	"fleetd/internal/devicetest"
	"fleetd/internal/fleet"
	"fleetd/internal/store"
)

func TestLogsAreRedacted(t *testing.T) {
	var out bytes.Buffer
	log := slog.New(slog.NewTextHandler(&out, &slog.HandlerOptions{ReplaceAttr: redactAttr}))
	log.With("api_token", "t0ken").Info("x", "Password", "hunter2", "device", "d1", slog.Group("g", "secretKey", "s3cret", "reason", "gone"))
	for _, secret := range []string{"t0ken", "hunter2", "s3cret"} {
		// security: R7
		if strings.Contains(out.String(), secret) {
			t.Errorf("%s is in the log: %s", secret, out.String())
		}
	}
	for _, kept := range []string{"device=d1", "g.reason=gone", audit.Redacted, "msg=x"} {
		if !strings.Contains(out.String(), kept) {
			t.Errorf("%s is not in the log: %s", kept, out.String())
		}
	}
}

// away is a database that takes nothing.
type away struct{}

func (away) SaveAuditBlock(context.Context, *audit.Block) error { return errors.New("away") }

// What no database took before a stop is there after the next start.
func TestAuditAfterStopWithoutDatabase(t *testing.T) {
	dir := open(t, t.TempDir())
	for range 2 { // two starts without a database
		log := audit.New(audit.Options{Node: "n-1", Store: away{}, Log: quiet, Spill: func(blocks []audit.Block) error { return spillAudit(dir, blocks) }})
		log.Record(audit.Entry{At: time.Now(), Kind: audit.KindCall, Action: "self.get_device_status", Key: "k", Outcome: "ok"})
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
		defer cancel()
		if err := log.Close(ctx); err != nil {
			t.Fatal(err)
		}
	}
	s, err := store.Open(t.Context(), "sqlite", dir.Path, quiet)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close(t.Context())
	n := &node{dir: dir, store: s, log: quiet}
	n.recoverAudit(t.Context())
	blocks, err := s.AuditRuns(t.Context(), audit.Query{})
	if err != nil {
		t.Fatal(err)
	}
	var v audit.Verifier
	for i := range blocks {
		v.Add(&blocks[i])
	}
	// security: R5
	if r := v.Report(); !r.Intact || r.Runs != 2 || r.Entries != 6 || len(r.Unended) != 0 {
		t.Errorf("%+v", r)
	}
	if _, err := os.Stat(dir.File(datadir.FileAudit)); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the file stays: %v", err)
	}
}

func TestPolicyFile(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "policy.json")
	write := func(text string) {
		t.Helper()
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	n := &node{cfg: load(t, map[string]string{"policy-file": path}), log: quiet}
	if err := n.readPolicy(); err == nil || !strings.HasPrefix(err.Error(), "--policy-file: ") {
		t.Errorf("a file that is not there: %v", err)
	}
	write(`{"rules":[{"name":"x","action":"maybe"}]}`)
	if err := n.readPolicy(); err == nil || !strings.Contains(err.Error(), "maybe") {
		t.Errorf("a wrong rule: %v", err)
	}
	write(`{"rules":[{"name":"no lamps","tools":["self.lamp.*"],"action":"deny"}]}`)
	if err := n.readPolicy(); err != nil {
		t.Fatal(err)
	}
	ports := devicetest.New()
	service := ports.Service(t, fleet.Config{PolicyFixed: true})
	log := audit.New(audit.Options{Node: "n-1", Store: away{}, Log: quiet, Spill: func([]audit.Block) error { return nil }})
	n.policy.attach(service, log)
	ctx, stop := context.WithCancel(t.Context())
	watched := make(chan struct{})
	go func() {
		defer close(watched)
		n.reload(ctx)
	}()
	name := func() string { return service.Guard().Policy().Rules[0].Name }
	if name() != "no lamps" {
		t.Errorf("%q is in force", name())
	}
	write(`{"version":7,"rules":[{"name":"nothing at all","action":"deny"}]}`)
	devicetest.Eventually(t, "the changed file is in force", func() bool { return name() == "nothing at all" })
	write(`{"rules":[`)
	devicetest.Eventually(t, "the broken file is noticed", func() bool { return n.policy.failures.Load() == 1 })
	if version := service.Guard().Policy().Version; name() != "nothing at all" || version != 0 {
		t.Errorf("%q is in force, as version %d", name(), version)
	}
	by := access.Principal{Caller: access.Admin, Via: access.ViaREST}
	if _, err := service.SetPolicy(t.Context(), by, access.Policy{}, 0); devices.AsError(err).Code != devices.CodeForbidden {
		t.Errorf("the API changes the policy of a file: %v", err)
	}
	stop()
	<-watched
	over, cancel := context.WithCancel(t.Context())
	cancel()
	if err := log.Close(over); err != nil {
		t.Error(err)
	}
}

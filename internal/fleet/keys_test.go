package fleet_test

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"fleetd/internal/access"
	"fleetd/internal/devices"
	"fleetd/internal/devices/registry"
	"fleetd/internal/devicetest"
	"fleetd/internal/fleet"
)

// setVolume calls a tool of the test's device.
func setVolume(t *testing.T, s *fleet.Service) *devices.Error {
	t.Helper()
	_, err := call(t, s, "self.audio_speaker.set_volume", `{"volume":1}`)
	return err
}

// A node that has not read the operator's rules cannot know what they forbid.
func TestNoCallsWithoutRules(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := devicetest.New()
		p.Put(devices.Member{ID: id, ClientID: "c1"})
		s := p.Unread(t, fleet.Config{})
		who := devices.Identity{Device: id, ClientID: "c1", Transport: devices.TransportWebSocket}
		// security: K6
		if _, err := s.Accept(who, &pipe{script: devicetest.NewScript()}); devices.AsError(err).Code != devices.CodeUnavailable {
			t.Errorf("a device is accepted before the members are read: %v", err)
		}
		// security: K6
		if err := setVolume(t, s); err == nil || err.Code != devices.CodeUnavailable || err.Part != "database" {
			t.Errorf("before the rules are read: %v", err)
		}
		p.Back(t, s)
		connect(t, s, "c1", devicetest.NewScript())
		ready(t, s)
		// security: K6
		if err := setVolume(t, s); err != nil {
			t.Errorf("after reading that there are no rules: %v", err)
		}
		// A policy version that this program does not understand is not an empty policy.
		later := devicetest.New()
		later.Put(devices.Member{ID: id, ClientID: "c1"})
		if _, err := later.Ledger.SavePolicy(t.Context(), "later", access.Policy{Version: 1, Rules: []access.Rule{{Action: "later"}}}); err != nil {
			t.Fatal(err)
		}
		other := later.Service(t, fleet.Config{})
		connect(t, other, "c1", devicetest.NewScript())
		ready(t, other)
		// security: K6
		if err := setVolume(t, other); err == nil || err.Code != devices.CodeUnavailable {
			t.Errorf("with rules of a newer version: %v", err)
		}
	})
}

// A revocation of a key applies without the database, survives a restart, and is written
// when the database is back.
func TestKeysWhileTheDatabaseIsAway(t *testing.T) {
	dir := t.TempDir()
	bubble(t, fleet.Config{Dir: dir}, func(t *testing.T, p *devicetest.Ports, s *fleet.Service) {
		scopes, _ := access.ParseScopes([]string{"tools:call"})
		params := fleet.NewKeyParams{Name: "kitchen agent", Scopes: scopes}
		if _, _, err := s.CreateKey(t.Context(), principalWith(t, access.ViaREST, "devices:write", ""), params); devices.AsError(err).Code != devices.CodeForbidden {
			t.Errorf("created without the right: %v", err)
		}
		k, token, err := s.CreateKey(t.Context(), devicetest.Admin, params)
		if err != nil {
			t.Fatal(err)
		}
		if _, _, err := s.CreateKey(t.Context(), devicetest.Admin, params); devices.AsError(err).Code != devices.CodeBadRequest {
			t.Errorf("a second key of that name: %v", err)
		}
		p.SetAway(true)
		if _, _, err := s.CreateKey(t.Context(), devicetest.Admin, fleet.NewKeyParams{Name: "x", Scopes: scopes}); devices.AsError(err).Code != devices.CodeUnavailable {
			t.Errorf("created while the database is unreachable: %v", err)
		}
		if who, err := s.Keys().Authenticate(token, time.Now()); err != nil || who.Key != k.ID {
			t.Errorf("%v %v", who, err)
		}
		_, r, err := s.RevokeKey(t.Context(), devicetest.Admin, "kitchen agent")
		if err != nil || r.Recorded || !slices.Equal(r.Nodes, []string{"n-test"}) {
			t.Fatalf("%+v, %v", r, err)
		}
		// security: K9
		if _, err := s.Keys().Authenticate(token, time.Now()); !errors.Is(err, access.ErrRevoked) {
			t.Errorf("revoked: %v", err)
		}
		if _, again, err := s.RevokeKey(t.Context(), devicetest.Admin, k.ID); err != nil || again.Recorded {
			t.Errorf("revoked twice: %+v, %v", again, err)
		}
		s.Close()
		// The node restarts before it could write the revocation.
		again := p.Service(t, fleet.Config{Node: "again", Dir: dir})
		// security: K9
		if _, err := again.Keys().Authenticate(token, time.Now()); !errors.Is(err, access.ErrRevoked) {
			t.Errorf("after the restart: %v", err)
		}
		if stored := p.Ledger.Keys()[k.ID]; !stored.Revoked.IsZero() {
			t.Fatalf("the test proves nothing: %+v", stored)
		}
		p.Back(t, again)
		synctest.Wait()
		// security: K9
		if stored := p.Ledger.Keys()[k.ID]; stored.Revoked.IsZero() || len(again.Registry().PendingRevocations()) != 0 {
			t.Errorf("when the database is back: %+v", stored)
		}
		// security: K9
		if _, err := again.Keys().Authenticate(token, time.Now()); !errors.Is(err, access.ErrRevoked) {
			t.Errorf("after it was written: %v", err)
		}
		again.Close()
		kept := fmt.Sprint(p.Ledger.Keys(), p.Ledger.Log(0))
		files, err := os.ReadDir(dir)
		if err != nil || len(files) == 0 {
			t.Fatal(files, err)
		}
		for _, f := range files {
			text, err := os.ReadFile(filepath.Join(dir, f.Name()))
			if err != nil {
				t.Fatal(err)
			}
			kept += string(text)
		}
		// security: K1
		if strings.Contains(kept, token[len(token)-32:]) {
			t.Error("a token is stored")
		}
		for _, e := range p.Audited {
			// security: K1
			if strings.Contains(fmt.Sprint(e), token) {
				t.Errorf("the audit entry contains a token: %+v", e)
			}
		}
	})
}

// A revocation applies on a node that receives it before it receives the key.
func TestKeyEndsBeforeItIsKnown(t *testing.T) {
	p := devicetest.New()
	a, b := p.Service(t, fleet.Config{Node: "a"}), p.Service(t, fleet.Config{Node: "b"})
	scopes, _ := access.ParseScopes([]string{"tools:call"})
	k, token, err := a.CreateKey(t.Context(), devicetest.Admin, fleet.NewKeyParams{Name: "short", Scopes: scopes})
	if err != nil {
		t.Fatal(err)
	}
	p.SetAway(true)
	if err := b.Registry().AddRevocation(registry.Revocation{ID: "r", Key: k.ID, Who: "admin", At: time.Now()}); err != nil {
		t.Fatal(err)
	}
	b.Registry().Offer(p.Ledger.Log(0))
	// security: K9
	if _, err := b.Keys().Authenticate(token, time.Now()); !errors.Is(err, access.ErrRevoked) {
		t.Errorf("the key: %v", err)
	}
}

func TestPolicyVersions(t *testing.T) {
	dir := t.TempDir()
	bubble(t, fleet.Config{Dir: dir}, func(t *testing.T, p *devicetest.Ports, s *fleet.Service) {
		p.Put(devices.Member{ID: id, ClientID: "c1"})
		deny := access.Policy{Rules: []access.Rule{{Name: "all", Action: access.Deny}}}
		if _, err := s.SetPolicy(t.Context(), principalWith(t, access.ViaREST, "devices:write", ""), deny, 0); devices.AsError(err).Code != devices.CodeForbidden {
			t.Errorf("without the right: %v", err)
		}
		first, err := s.SetPolicy(t.Context(), devicetest.Admin, deny, 0)
		if err != nil || first.Version != 1 || p.Ledger.Policy().Version != 1 {
			t.Fatal(first, err)
		}
		if _, err := s.SetPolicy(t.Context(), devicetest.Admin, access.Policy{}, 0); devices.AsError(err).Code != devices.CodeStale {
			t.Errorf("over an unknown version: %v", err)
		}
		elsewhere := func(policy access.Policy) []devices.Change {
			changes, err := p.Ledger.SavePolicy(t.Context(), "elsewhere", policy)
			if err != nil {
				t.Fatal(err)
			}
			return changes
		}
		second, third := elsewhere(access.Policy{Version: 2, Rules: deny.Rules}), elsewhere(access.Policy{Version: 3})
		if _, err := s.SetPolicy(t.Context(), devicetest.Admin, access.Policy{}, 1); devices.AsError(err).Code != devices.CodeStale {
			t.Errorf("over a version that was not received: %v", err)
		}
		s.Registry().Offer(third)
		s.Registry().Offer(second)
		// security: K14
		if got := s.Guard().Policy(); got.Version != 3 || len(got.Rules) != 0 {
			t.Errorf("an older version came into force: %+v", got)
		}
		s.Registry().Offer(elsewhere(access.Policy{Version: 4, Rules: []access.Rule{{Action: "later"}}}))
		// security: K14
		if got := s.Guard().Policy(); got.Version != 3 {
			t.Errorf("a version of a newer program came into force: %+v", got)
		}
		s.Registry().Offer(elsewhere(access.Policy{Version: 5, Rules: deny.Rules}))
		older, err := access.Compile(access.Policy{Version: 4})
		if err != nil {
			t.Fatal(err)
		}
		// security: K14
		if s.InstallGuard(older) || s.Guard().Policy().Version != 5 {
			t.Errorf("an older version came into force: %+v", s.Guard().Policy())
		}
		fresh := p.Service(t, fleet.Config{Node: "fresh"})
		defer fresh.Close()
		// security: K6
		if err := fresh.Registry().Refresh(t.Context()); err != nil || fresh.Guard().Policy().Version != 5 {
			t.Errorf("a node that read everything has version %d, %v", fresh.Guard().Policy().Version, err)
		}
		p.SetAway(true)
		// security: K6
		if err := s.Registry().Refresh(t.Context()); err == nil || s.Guard().Policy().Version != 5 {
			t.Errorf("without the database version %d is in force, %v", s.Guard().Policy().Version, err)
		}
		s.Close()
		again := p.Service(t, fleet.Config{Node: "again", Dir: dir})
		connect(t, again, "c1", devicetest.NewScript())
		ready(t, again)
		// security: K6
		if err := setVolume(t, again); err == nil || err.Rule != "policy:all" {
			t.Errorf("after a restart without the database: %v", err)
		}
	})
}

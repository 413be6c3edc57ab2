package devices_test

import (
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"fleetd/internal/access"
	"fleetd/internal/devices"
	"fleetd/internal/devicetest"
)

// A node that never read the operator's rules cannot tell what they forbid.
func TestNoCallsWithoutRules(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := devicetest.New()
		p.Away = true
		s := devices.New(devices.Config{Node: "n", CallsPerDevice: 1, Handshakes: 1}, devices.Ports{Records: p, Catalogs: p, Keeper: p, Rotations: p, Warden: p,
			Publisher: p, Directory: p, Router: p, Vision: p, Audio: p, Log: slog.New(slog.DiscardHandler)})
		defer s.Close()
		connect(t, s, "c1", devicetest.NewScript())
		ready(t, s)
		// security: K6
		if _, err := call(t, s, "self.audio_speaker.set_volume", `{"volume":1}`); err == nil || err.Code != devices.CodeUnavailable {
			t.Errorf("before the rules are known: %v", err)
		}
		s.RestoreDoors(devices.Doors{}) // notes of an earlier version
		// security: K6
		if _, err := call(t, s, "self.audio_speaker.set_volume", `{"volume":1}`); err == nil {
			t.Error("notes without rules count as rules")
		}
		s.RestoreDoors(devices.Doors{Known: true})
		// security: K6
		if _, err := call(t, s, "self.audio_speaker.set_volume", `{"volume":1}`); err != nil {
			t.Errorf("with notes that there are none: %v", err)
		}
	})
}

func TestKeysWhileTheDatabaseIsAway(t *testing.T) {
	bubble(t, devices.Config{}, func(t *testing.T, p *devicetest.Ports, s *devices.Service) {
		scopes, _ := access.ParseScopes([]string{"tools:call"})
		wish := devices.KeyWish{Name: "kitchen agent", Scopes: scopes}
		if _, _, err := s.CreateKey(t.Context(), someone(t, access.ViaREST, "devices:write", ""), wish); devices.AsError(err).Code != devices.CodeForbidden {
			t.Errorf("made by who may not: %v", err)
		}
		k, token, err := s.CreateKey(t.Context(), devicetest.Admin, wish)
		if err != nil {
			t.Fatal(err)
		}
		if _, _, err := s.CreateKey(t.Context(), devicetest.Admin, wish); devices.AsError(err).Code != devices.CodeBadRequest {
			t.Errorf("a second of that name: %v", err)
		}
		p.Away = true
		if _, _, err := s.CreateKey(t.Context(), devicetest.Admin, devices.KeyWish{Name: "x", Scopes: scopes}); !errors.Is(err, devices.ErrDatabase) {
			t.Errorf("made while the database is away: %v", err)
		}
		if who, err := s.Registry().Authenticate(token, time.Now()); err != nil || who.Key != k.ID {
			t.Errorf("%v %v", who, err)
		}
		if _, err := s.RevokeKey(t.Context(), devicetest.Admin, "kitchen agent"); err != nil {
			t.Fatal(err)
		}
		// security: K9
		if _, err := s.Registry().Authenticate(token, time.Now()); !errors.Is(err, access.ErrRevoked) {
			t.Errorf("revoked: %v", err)
		}
		notes := s.Doors()
		p.Away = false
		// The node is started again before it could write the end.
		again := p.Service(t, devices.Config{Node: "again"})
		if _, err := again.Registry().Authenticate(token, time.Now()); err != nil {
			t.Fatalf("the test proves nothing: %v", err)
		}
		again.RestoreDoors(notes)
		if err := again.Reload(t.Context()); err != nil {
			t.Fatal(err)
		}
		// security: K9
		if _, err := again.Registry().Authenticate(token, time.Now()); !errors.Is(err, access.ErrRevoked) || p.Keys[k.ID].Revoked.IsZero() {
			t.Errorf("after the restart: %v, stored %+v", err, p.Keys[k.ID])
		}
		again.Close()
		// security: K1
		if strings.Contains(fmt.Sprint(p.Keys, notes), token[len(token)-32:]) {
			t.Errorf("a token is stored: %+v, %+v", p.Keys, notes)
		}
		for _, e := range p.Audited {
			// security: K1
			if strings.Contains(fmt.Sprint(e), token) {
				t.Errorf("the record holds a token: %+v", e)
			}
		}
	})
}

func TestPolicyVersions(t *testing.T) {
	bubble(t, devices.Config{}, func(t *testing.T, p *devicetest.Ports, s *devices.Service) {
		deny := access.Policy{Rules: []access.Rule{{Name: "all", Action: access.Deny}}}
		if _, err := s.SetPolicy(t.Context(), someone(t, access.ViaREST, "devices:write", ""), deny, 0); devices.AsError(err).Code != devices.CodeForbidden {
			t.Errorf("by who may not: %v", err)
		}
		first, err := s.SetPolicy(t.Context(), devicetest.Admin, deny, 0)
		if err != nil || first.Version != 1 || p.Policy.Version != 1 {
			t.Fatal(first, err)
		}
		if _, err := s.SetPolicy(t.Context(), devicetest.Admin, access.Policy{}, 0); devices.AsError(err).Code != devices.CodeBadRequest {
			t.Errorf("over a version not seen: %v", err)
		}
		s.Learn(devices.News{Policy: &access.Policy{Version: 3}})
		s.Learn(devices.News{Policy: &access.Policy{Version: 2, Rules: deny.Rules}})
		// security: K14
		if got := s.Guard().Policy(); got.Version != 3 || len(got.Rules) != 0 {
			t.Errorf("an older version came into force: %+v", got)
		}
		s.Learn(devices.News{Policy: &access.Policy{Version: 4, Rules: []access.Rule{{Action: "later"}}}})
		// security: K14
		if got := s.Guard().Policy(); got.Version != 3 {
			t.Errorf("a version of a later program came into force: %+v", got)
		}
		s.Learn(devices.News{Policy: &access.Policy{Version: 5, Rules: deny.Rules}})
		p.Away = true
		// security: K6
		if err := s.Reload(t.Context()); err == nil || s.Guard().Policy().Version != 5 {
			t.Errorf("without the database version %d is in force, %v", s.Guard().Policy().Version, err)
		}
		again := devices.New(devices.Config{Node: "again", CallsPerDevice: 1, Handshakes: 1}, devices.Ports{Records: p, Catalogs: p, Keeper: p, Rotations: p, Warden: p,
			Publisher: p, Directory: p, Router: p, Vision: p, Audio: p, Log: slog.New(slog.DiscardHandler)})
		defer again.Close()
		again.RestoreDoors(s.Doors())
		connect(t, again, "c1", devicetest.NewScript())
		ready(t, again)
		// security: K6
		if _, err := call(t, again, "self.audio_speaker.set_volume", `{"volume":1}`); err == nil || err.Rule != "policy:all" {
			t.Errorf("after a restart without the database: %v", err)
		}
	})
}

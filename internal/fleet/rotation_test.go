package fleet_test

import (
	"slices"
	"sync"
	"testing"
	"time"

	"fleetd/internal/devices"
	"fleetd/internal/devices/admission"
	"fleetd/internal/devices/session"
	"fleetd/internal/devicetest"
	"fleetd/internal/fleet"
)

const rotated = devices.ID("aa:bb:cc:dd:ee:ff")

// generations returns the valid generations, newest first.
func generations(s *fleet.Service, id devices.ID) []int64 {
	var all []int64
	s.Authenticate(id, "c1", func(g int64) bool {
		all = append(all, g)
		return false
	})
	return all
}

func wantGenerations(t testing.TB, what string, s *fleet.Service, want ...int64) {
	t.Helper()
	if got := generations(s, rotated); !slices.Equal(got, want) {
		t.Errorf("%s: generations %v are valid, want %v", what, got, want)
	}
}

// member is a core with one member.
func member(t testing.TB, p *devicetest.Ports) *fleet.Service {
	t.Helper()
	s := p.Service(t, fleet.Config{})
	if w, err := s.CheckIn(t.Context(), admission.CheckIn{Device: rotated, ClientID: "c1"}); err != nil || !w.Admitted {
		t.Fatalf("%+v, %v", w, err)
	}
	return s
}

// connectWith connects the device with credentials of a generation.
func connectWith(t testing.TB, s *fleet.Service, generation int64) (*session.Session, error) {
	t.Helper()
	return s.Accept(devices.Identity{Device: rotated, ClientID: "c1", Transport: devices.TransportMQTT, Verified: true, Generation: generation}, idle{})
}

// idle is a connection that does nothing.
type idle struct{}

func (idle) SendControl([]byte) error  { return nil }
func (idle) Close(devices.CloseReason) {}

// The old credentials are valid until the device has connected with the new ones.
func TestRotate(t *testing.T) {
	p := devicetest.New()
	s := member(t, p)
	session, err := connectWith(t, s, 0)
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Rotate(t.Context(), devicetest.Admin, rotated, time.Hour); err != nil {
		t.Fatal(err)
	}
	wantGenerations(t, "rotated", s, 1, 0)
	if v, err := s.Get(t.Context(), rotated); err != nil || v.State != devices.StateOnline || v.Credentials.Generation != 1 || time.Until(v.Credentials.PreviousUntil) < 59*time.Minute {
		t.Errorf("%+v, %v", v.Credentials, err)
	}
	if err := s.Rotate(t.Context(), devicetest.Admin, rotated, time.Hour); devices.AsError(err).Code != devices.CodeForbidden {
		t.Errorf("a second time: %v", err)
	}
	session.Close(devices.CloseGone)
	if _, err := connectWith(t, s, 0); err != nil {
		t.Errorf("a device that did not boot: %v", err)
	}
	if w, err := s.CheckIn(t.Context(), admission.CheckIn{Device: rotated, ClientID: "c1"}); err != nil || w.Generation != 1 {
		t.Errorf("%+v, %v", w, err)
	}
	if _, err := connectWith(t, s, 1); err != nil {
		t.Fatal(err)
	}
	// security: D3
	wantGenerations(t, "connected with the new ones", s, 1)
	// security: D3
	if _, err := connectWith(t, s, 0); devices.AsError(err).Code != devices.CodeUnauthorized {
		t.Errorf("old ones afterwards: %v", err)
	}
	if v, err := s.Get(t.Context(), rotated); err != nil || !v.Credentials.PreviousUntil.IsZero() {
		t.Errorf("%+v, %v", v.Credentials, err)
	}
	if err := s.Rotate(t.Context(), devicetest.Admin, rotated, time.Hour); err != nil {
		t.Error(err)
	}
	wantGenerations(t, "again", s, 2, 1)
}

// A connection with new credentials is not ended by what ends the one before it, which had old ones.
func TestNewCredentialsDuringTheEndOfOldOnes(t *testing.T) {
	s := member(t, devicetest.New())
	row := devices.Row{Device: devices.Device{ID: rotated, ClientID: "c1", Admission: devices.AdmissionMember}}
	for generation := range int64(2000) {
		if err := s.Rotate(t.Context(), devicetest.Admin, rotated, time.Hour); err != nil {
			t.Fatal(err)
		}
		if _, err := connectWith(t, s, generation); err != nil {
			t.Fatal(err)
		}
		var rows sync.WaitGroup
		rows.Go(func() { s.OnRow(row) })
		x, err := connectWith(t, s, generation+1)
		if err != nil {
			t.Fatal(err)
		}
		rows.Wait()
		if s.Session(rotated) != x {
			t.Fatalf("the connection with generation %d was ended", generation+1)
		}
	}
}

// A revocation during the grace period ends old and new credentials at once; an approval
// then creates others.
func TestRevokeEndsGrace(t *testing.T) {
	s := member(t, devicetest.New())
	if _, err := s.RotateAll(t.Context(), devicetest.Admin, time.Hour, nil); err != nil {
		t.Fatal(err)
	}
	if err := s.Rotate(t.Context(), devicetest.Admin, rotated, 2*time.Hour); err != nil {
		t.Fatal(err)
	}
	wantGenerations(t, "fleet and device", s, 2, 1, 0)
	if err := revoke(t, s, rotated); err != nil {
		t.Fatal(err)
	}
	// security: D3
	if _, _, admitted := s.Authenticate(rotated, "c1", func(int64) bool { return true }); admitted || s.Accepts(rotated, 0) || s.Accepts(rotated, 3) {
		t.Error("a revoked device is accepted")
	}
	if err := s.Rotate(t.Context(), devicetest.Admin, rotated, time.Hour); devices.AsError(err).Code != devices.CodeForbidden {
		t.Errorf("rotate a revoked device: %v", err)
	}
	if _, err := s.Approve(t.Context(), devicetest.Admin, string(rotated), ""); err != nil {
		t.Fatal(err)
	}
	// security: D3
	wantGenerations(t, "approved again", s, 3)
}

// The fleet's rotation applies to every device, whatever its own generation, and to
// devices that join later; nothing is written per device.
func TestRotateAll(t *testing.T) {
	p := devicetest.New()
	s := member(t, p)
	other := devices.ID("other")
	if _, err := s.CheckIn(t.Context(), admission.CheckIn{Device: other, ClientID: "c2"}); err != nil {
		t.Fatal(err)
	}
	for range 2 { // generation 2
		if err := revoke(t, s, other); err != nil {
			t.Fatal(err)
		}
		if _, err := s.Approve(t.Context(), devicetest.Admin, string(other), ""); err != nil {
			t.Fatal(err)
		}
	}
	changes := len(p.Ledger.Log(0))
	r, err := s.RotateAll(t.Context(), devicetest.Admin, time.Hour, nil)
	if err != nil || r.Generation != 3 || r.Previous != 0 {
		t.Fatalf("%+v, %v", r, err)
	}
	wantGenerations(t, "one of generation 0", s, 3, 0)
	if got := generations(s, other); !slices.Equal(got, []int64{3, 2}) {
		t.Errorf("one of generation 2: %v", got)
	}
	if got := generations(s, "later"); !slices.Equal(got, []int64{3, 0}) {
		t.Errorf("one that joins later: %v", got)
	}
	if n := len(p.Ledger.Log(0)) - changes; n != 1 {
		t.Errorf("%d changes were written, not one for all devices", n)
	}
	if _, err := s.RotateAll(t.Context(), devicetest.Admin, time.Hour, nil); devices.AsError(err).Code != devices.CodeForbidden {
		t.Errorf("a second time: %v", err)
	}
	p.SetAway(true)
	if _, err := member(t, devicetest.New()).RotateAll(t.Context(), devicetest.Admin, 0, nil); devices.AsError(err).Code != devices.CodeBadRequest {
		t.Errorf("no grace: %v", err)
	}
}

func TestRotateAllNeedsTheDatabase(t *testing.T) {
	p := devicetest.New()
	s := member(t, p)
	there := p.Service(t, fleet.Config{Node: "there"})
	p.SetAway(true)
	if _, err := s.RotateAll(t.Context(), devicetest.Admin, time.Hour, nil); devices.AsError(err).Code != devices.CodeUnavailable {
		t.Errorf("%v", err)
	}
	wantGenerations(t, "afterwards", s, 0)
	p.SetAway(false)
	if _, err := there.RotateAll(t.Context(), devicetest.Admin, time.Hour, nil); err != nil {
		t.Fatal(err)
	}
	if _, err := s.RotateAll(t.Context(), devicetest.Admin, time.Hour, nil); devices.AsError(err).Code != devices.CodeForbidden {
		t.Errorf("rotated by another node meanwhile: %v", err)
	}
}

// Other nodes learn of a rotation by a hint, else from the log; a node that starts reads
// it from the database or its own snapshot.
func TestRotationIsKnownEverywhere(t *testing.T) {
	p := devicetest.New()
	here := member(t, p)
	there, missed := p.Service(t, fleet.Config{Node: "there"}), p.Service(t, fleet.Config{Node: "missed"})
	before := p.Ledger.Log(0)
	if _, err := here.RotateAll(t.Context(), devicetest.Admin, time.Hour, nil); err != nil {
		t.Fatal(err)
	}
	if err := here.Rotate(t.Context(), devicetest.Admin, rotated, time.Hour); err != nil {
		t.Fatal(err)
	}
	wantGenerations(t, "before the hint", there, 0)
	changes := p.Ledger.Log(int64(len(before)))
	there.Registry().Offer(changes)
	wantGenerations(t, "by a hint", there, 2, 1, 0)
	there.Registry().Offer(before) // late
	wantGenerations(t, "after an old hint", there, 2, 1, 0)
	there.OnClaim(devices.Claim{Device: rotated, Kind: devices.ClaimConnect, Node: "here", Epoch: 1, Generation: 2})
	wantGenerations(t, "after it connected to another node, without a session here", there, 2, 1, 0)
	devicetest.Refresh(t, missed)
	wantGenerations(t, "by the log", missed, 2, 1, 0)
	dir := t.TempDir()
	noted := p.Service(t, fleet.Config{Node: "noted", Dir: dir})
	wantGenerations(t, "after a start", noted, 2, 1, 0)
	noted.Close()
	p.SetAway(true)
	wantGenerations(t, "from the snapshot", p.Service(t, fleet.Config{Node: "noted", Dir: dir}), 2, 1, 0)
}

// A device that has connected with newer credentials, to any node, is not accepted with
// older ones anywhere: its row contains the generation.
func TestNewerCredentialsElsewhereEndOlderOnes(t *testing.T) {
	p := devicetest.New()
	here := member(t, p)
	there := p.Service(t, fleet.Config{Node: "there"})
	if err := here.Rotate(t.Context(), devicetest.Admin, rotated, time.Hour); err != nil {
		t.Fatal(err)
	}
	devicetest.Refresh(t, there)
	x, err := connectWith(t, here, 1)
	if err != nil {
		t.Fatal(err)
	}
	x.Close(devices.CloseGone)
	// security: D3
	if _, err := connectWith(t, there, 0); devices.AsError(err).Code != devices.CodeUnauthorized {
		t.Errorf("older credentials on another node: %v", err)
	}
	if _, err := connectWith(t, there, 1); err != nil {
		t.Errorf("the newer ones: %v", err)
	}
	// If the row cannot be read the device is accepted; the session ends when it can.
	away := p.Service(t, fleet.Config{Node: "away"})
	p.SetAway(true)
	c := &pipe{script: devicetest.NewScript()}
	if c.session, err = away.Accept(devices.Identity{Device: rotated, ClientID: "c1", Transport: devices.TransportMQTT, Verified: true}, c); err != nil {
		t.Fatalf("while the database is away: %v", err)
	}
	p.SetAway(false)
	// security: D3
	devicetest.Eventually(t, "the session with older credentials ends", func() bool { return c.reason() == devices.CloseRevoked })
}

// After the grace period the old credentials are invalid.
func TestGraceEnds(t *testing.T) {
	p := devicetest.New()
	s := member(t, p)
	s.Registry().Offer(p.Ledger.SetRotation(devices.Rotation{Generation: 4, PreviousUntil: time.Now().Add(-time.Second)}))
	// security: D3
	wantGenerations(t, "of the fleet", s, 4)
	if _, err := s.Registry().Decide(t.Context(), []devices.Decision{{Device: rotated, Decide: func(m *devices.Member) error {
		m.Generation, m.Previous, m.PreviousUntil = 5, 4, time.Now().Add(-time.Second)
		return nil
	}}}); err != nil {
		t.Fatal(err)
	}
	// security: D3
	wantGenerations(t, "of the device", s, 5)
	if g, ok := s.OldestGeneration(rotated); !ok || g != 5 {
		t.Errorf("oldest %d", g)
	}
}

// A forgotten device cannot connect with its old credentials, during the grace period either.
func TestForgetEndsGrace(t *testing.T) {
	p := devicetest.New()
	s := member(t, p)
	if err := s.Rotate(t.Context(), devicetest.Admin, rotated, time.Hour); err != nil {
		t.Fatal(err)
	}
	if err := s.Forget(t.Context(), devicetest.Admin, rotated); err != nil {
		t.Fatal(err)
	}
	wantGenerations(t, "forgotten", s, 2)
	if _, err := s.CheckIn(t.Context(), admission.CheckIn{Device: rotated, ClientID: "c1"}); err != nil {
		t.Fatal(err)
	}
	wantGenerations(t, "back", s, 2)
}

package devices_test

import (
	"context"
	"slices"
	"testing"
	"time"

	"fleetd/internal/devices"
	"fleetd/internal/devicetest"
)

const rotated = devices.ID("aa:bb:cc:dd:ee:ff")

// generations are those that open the door, the newest first.
func generations(s *devices.Service, id devices.ID) []int64 {
	var all []int64
	s.Authenticate(id, func(g int64) bool {
		all = append(all, g)
		return false
	})
	return all
}

func wantGenerations(t testing.TB, what string, s *devices.Service, want ...int64) {
	t.Helper()
	if got := generations(s, rotated); !slices.Equal(got, want) {
		t.Errorf("%s: generations %v are valid, want %v", what, got, want)
	}
}

// member is a core with one member.
func member(t testing.TB, p *devicetest.Ports) *devices.Service {
	t.Helper()
	s := p.Service(t, devices.Config{})
	if w, err := s.CheckIn(devices.CheckIn{Device: rotated, ClientID: "c1"}); err != nil || !w.Admitted {
		t.Fatalf("%+v, %v", w, err)
	}
	return s
}

// comes connects the device with credentials of a generation.
func comes(t testing.TB, s *devices.Service, generation int64) (*devices.Session, error) {
	t.Helper()
	return s.Accept(devices.Identity{Device: rotated, ClientID: "c1", Transport: devices.TransportMQTT, Verified: true, Generation: generation}, idle{})
}

// idle is a connection on which nothing happens.
type idle struct{}

func (idle) SendControl([]byte) error  { return nil }
func (idle) Close(devices.CloseReason) {}

// The old credentials live until the device has come with the new ones.
func TestRotate(t *testing.T) {
	p := devicetest.New()
	s := member(t, p)
	session, err := comes(t, s, 0)
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Rotate(rotated, time.Hour); err != nil {
		t.Fatal(err)
	}
	wantGenerations(t, "rotated", s, 1, 0)
	if v, err := s.Get(t.Context(), rotated); err != nil || v.State != devices.StateOnline || v.Credentials.Generation != 1 || time.Until(v.Credentials.PreviousUntil) < 59*time.Minute {
		t.Errorf("%+v, %v", v.Credentials, err)
	}
	if err := s.Rotate(rotated, time.Hour); devices.AsError(err).Code != devices.CodeForbidden {
		t.Errorf("a second time: %v", err)
	}
	session.Close(devices.CloseGone)
	if _, err := comes(t, s, 0); err != nil {
		t.Errorf("a device that did not boot: %v", err)
	}
	if w, err := s.CheckIn(devices.CheckIn{Device: rotated, ClientID: "c1"}); err != nil || w.Generation != 1 {
		t.Errorf("%+v, %v", w, err)
	}
	if _, err := comes(t, s, 1); err != nil {
		t.Fatal(err)
	}
	// security: D3
	wantGenerations(t, "come with the new ones", s, 1)
	// security: D3
	if _, err := comes(t, s, 0); devices.AsError(err).Code != devices.CodeUnauthorized {
		t.Errorf("old ones afterwards: %v", err)
	}
	if v, err := s.Get(t.Context(), rotated); err != nil || !v.Credentials.PreviousUntil.IsZero() {
		t.Errorf("%+v, %v", v.Credentials, err)
	}
	if err := s.Rotate(rotated, time.Hour); err != nil {
		t.Error(err)
	}
	wantGenerations(t, "again", s, 2, 1)
}

// Revoking during the grace kills old and new at once; what is approved then
// has neither.
func TestRevokeEndsGrace(t *testing.T) {
	s := member(t, devicetest.New())
	if _, err := s.RotateAll(t.Context(), time.Hour); err != nil {
		t.Fatal(err)
	}
	if err := s.Rotate(rotated, 2*time.Hour); err != nil {
		t.Fatal(err)
	}
	wantGenerations(t, "fleet and device", s, 2, 1, 0)
	if err := s.Revoke(rotated); err != nil {
		t.Fatal(err)
	}
	// security: D3
	if _, _, admitted := s.Authenticate(rotated, func(int64) bool { return true }); admitted || s.Accepts(rotated, 0) || s.Accepts(rotated, 3) {
		t.Error("a revoked device is let in")
	}
	if err := s.Rotate(rotated, time.Hour); devices.AsError(err).Code != devices.CodeForbidden {
		t.Errorf("rotate a revoked device: %v", err)
	}
	if _, err := s.Approve(string(rotated)); err != nil {
		t.Fatal(err)
	}
	// security: D3
	wantGenerations(t, "approved again", s, 3)
}

// The fleet's rotation holds for every device, whatever its own generation,
// and for those that come later; nothing is written per device.
func TestRotateAll(t *testing.T) {
	p := devicetest.New()
	s := member(t, p)
	other := devices.ID("other")
	if _, err := s.CheckIn(devices.CheckIn{Device: other, ClientID: "c2"}); err != nil {
		t.Fatal(err)
	}
	for range 2 { // generation 2
		if err := s.Revoke(other); err != nil {
			t.Fatal(err)
		}
		if _, err := s.Approve(string(other)); err != nil {
			t.Fatal(err)
		}
	}
	exceptions := len(p.Exceptions)
	r, err := s.RotateAll(t.Context(), time.Hour)
	if err != nil || r.Generation != 3 || r.Previous != 0 {
		t.Fatalf("%+v, %v", r, err)
	}
	wantGenerations(t, "one of generation 0", s, 3, 0)
	if got := generations(s, other); !slices.Equal(got, []int64{3, 2}) {
		t.Errorf("one of generation 2: %v", got)
	}
	if got := generations(s, "later"); !slices.Equal(got, []int64{3, 0}) {
		t.Errorf("one that comes later: %v", got)
	}
	if len(p.Exceptions) != exceptions {
		t.Error("rows were written per device")
	}
	if _, err := s.RotateAll(t.Context(), time.Hour); devices.AsError(err).Code != devices.CodeForbidden {
		t.Errorf("a second time: %v", err)
	}
	p.Away = true
	if _, err := member(t, devicetest.New()).RotateAll(t.Context(), 0); devices.AsError(err).Code != devices.CodeBadRequest {
		t.Errorf("no grace: %v", err)
	}
}

func TestRotateAllNeedsTheDatabase(t *testing.T) {
	p := devicetest.New()
	s := member(t, p)
	p.Away = true
	if _, err := s.RotateAll(t.Context(), time.Hour); devices.AsError(err).Code != devices.CodeUnavailable {
		t.Errorf("%v", err)
	}
	wantGenerations(t, "afterwards", s, 0)
	p.Away, p.Fleet = false, devices.Rotation{Generation: 9}
	if _, err := s.RotateAll(t.Context(), time.Hour); devices.AsError(err).Code != devices.CodeForbidden {
		t.Errorf("rotated by another node meanwhile: %v", err)
	}
}

// Other nodes know at once; one that missed the news knows after a reload, one
// that starts reads it from the database or its own notes.
func TestRotationIsKnownEverywhere(t *testing.T) {
	p := devicetest.New()
	here := member(t, p)
	there := p.Service(t, devices.Config{Node: "there"})
	if _, err := here.RotateAll(t.Context(), time.Hour); err != nil {
		t.Fatal(err)
	}
	if err := here.Rotate(rotated, time.Hour); err != nil {
		t.Fatal(err)
	}
	wantGenerations(t, "before the news", there, 0)
	r, x := p.Fleet, p.Exceptions[len(p.Exceptions)-1]
	there.Learn(devices.News{Rotation: &r})
	there.Learn(devices.News{Exception: &x})
	wantGenerations(t, "by news", there, 2, 1, 0)
	there.Learn(devices.News{Rotation: &devices.Rotation{}}) // late, and older
	wantGenerations(t, "after old news", there, 2, 1, 0)
	there.Claimed(devices.Claim{Device: rotated, Kind: devices.ClaimConnect, Node: "here", Epoch: 1, Generation: 2})
	wantGenerations(t, "once it has come elsewhere", there, 2)
	missed := p.Service(t, devices.Config{Node: "missed"})
	if err := missed.Reload(t.Context()); err != nil {
		t.Fatal(err)
	}
	wantGenerations(t, "by reload", missed, 2, 1, 0)
	if _, err := comes(t, here, 1); err != nil { // a node of its own knows it from the row
		t.Fatal(err)
	}
	wantGenerations(t, "started anew", p.Service(t, devices.Config{Node: "new"}), 2, 1)
	noted := devices.New(devices.Config{Node: "noted", CallsPerDevice: 1, Handshakes: 1}, devices.Ports{})
	defer noted.Close()
	rows, exceptions := here.Known()
	noted.RestoreRotation(here.KnownRotation())
	noted.Restore(rows, exceptions)
	wantGenerations(t, "from notes", noted, 2, 1)
}

// When the grace is over the old credentials are worth nothing.
func TestGraceEnds(t *testing.T) {
	p := devicetest.New()
	s := member(t, p)
	ended := devices.Rotation{Generation: 4, PreviousUntil: time.Now().Add(-time.Second)}
	s.Learn(devices.News{Rotation: &ended})
	// security: D3
	wantGenerations(t, "of the fleet", s, 4)
	s.Learn(devices.News{Exception: &devices.Exception{Device: rotated, Generation: 5, Previous: 4, PreviousUntil: time.Now().Add(-time.Second)}})
	// security: D3
	wantGenerations(t, "of the device", s, 5)
	if g, ok := s.OldestGeneration(rotated); !ok || g != 5 {
		t.Errorf("oldest %d", g)
	}
}

// A forgotten device comes back with nothing it had, grace or not.
func TestForgetEndsGrace(t *testing.T) {
	p := devicetest.New()
	s := member(t, p)
	if err := s.Rotate(rotated, time.Hour); err != nil {
		t.Fatal(err)
	}
	if err := s.Forget(context.Background(), rotated); err != nil {
		t.Fatal(err)
	}
	wantGenerations(t, "forgotten", s, 2)
	if _, err := s.CheckIn(devices.CheckIn{Device: rotated, ClientID: "c1"}); err != nil {
		t.Fatal(err)
	}
	wantGenerations(t, "back", s, 2)
}

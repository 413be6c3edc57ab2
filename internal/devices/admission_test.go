package devices_test

import (
	"errors"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"fleetd/internal/devices"
	"fleetd/internal/devicetest"
)

func check(t *testing.T, s *devices.Service, client string) devices.Welcome {
	t.Helper()
	w, err := s.CheckIn(devices.CheckIn{Device: id, ClientID: client, Board: "b", Firmware: "2.4.2"})
	if err != nil {
		t.Fatal(err)
	}
	return w
}

func TestOpenAdmission(t *testing.T) {
	bubble(t, devices.Config{}, func(t *testing.T, p *devicetest.Ports, s *devices.Service) {
		if w := check(t, s, "c1"); !w.Admitted || w.Code != "" {
			t.Errorf("unknown device: %+v", w)
		}
		w := check(t, s, "c2")
		if w.Admitted || len(w.Code) != 6 || w.Challenge == "" {
			t.Errorf("known device, another client: %+v", w)
		}
		if again := check(t, s, "c2"); again.Code != w.Code {
			t.Error("the code changes between checks")
		}
		if w := check(t, s, "c1"); !w.Admitted {
			t.Error("the waiting clone locked the member out")
		}
		if events := p.Seen(devices.EventPending); len(events) != 1 {
			t.Errorf("%d pending events, want 1", len(events))
		}
		if got, err := s.Approve(w.Code); err != nil || got != id {
			t.Fatalf("approve by code: %s, %v", got, err)
		}
		if w := check(t, s, "c2"); !w.Admitted || w.Generation != 1 {
			t.Errorf("approved: %+v", w)
		}
		if w := check(t, s, "c1"); w.Admitted {
			t.Error("the replaced client is still admitted")
		}
	})
}

func TestApproveAdmission(t *testing.T) {
	bubble(t, devices.Config{Approve: true}, func(t *testing.T, p *devicetest.Ports, s *devices.Service) {
		w := check(t, s, "c1")
		if w.Admitted || s.Activated(id, "c1") {
			t.Fatalf("%+v", w)
		}
		check(t, s, "c1")
		if events := p.Seen(devices.EventPending); len(events) != 1 || string(events[0].Fields) != `"client_id":"c1","known":false` {
			t.Errorf("events %+v", events)
		}
		if v := state(t, s); v.State != devices.StatePending || v.Device.PendingID != "c1" {
			t.Errorf("%+v", v)
		}
		time.Sleep(devices.CodeLife)
		if again := check(t, s, "c1"); again.Code == w.Code {
			t.Error("the code outlives its life")
		}
		if _, err := s.Approve(w.Code); err == nil {
			t.Error("an expired code is accepted")
		}
		if _, err := s.Approve(string(id)); err != nil {
			t.Fatal(err)
		}
		if w := check(t, s, "c1"); !w.Admitted || w.Generation != 0 || !s.Activated(id, "c1") || s.Activated(id, "c2") {
			t.Errorf("%+v", w)
		}
	})
}

// Whoever asks last under a waiting device's id gets nothing by it.
func TestApproveByIDWantsOneClient(t *testing.T) {
	bubble(t, devices.Config{Approve: true}, func(t *testing.T, _ *devicetest.Ports, s *devices.Service) {
		owner := check(t, s, "owner")
		check(t, s, "attacker")
		if _, err := s.Approve(string(id)); err == nil || devices.AsError(err).Code != devices.CodeForbidden {
			t.Errorf("approval by id: %v", err)
		}
		if _, err := s.Approve(owner.Code); err != nil || !s.Activated(id, "owner") || s.Activated(id, "attacker") {
			t.Errorf("approval by code: %v", err)
		}
	})
}

func TestWrongCodesAreLimited(t *testing.T) {
	bubble(t, devices.Config{Approve: true}, func(t *testing.T, _ *devicetest.Ports, s *devices.Service) {
		w := check(t, s, "c1")
		wrong := "000000"
		if w.Code == wrong {
			wrong = "000001"
		}
		for range devices.MaxWrongCodes {
			if _, err := s.Approve(wrong); devices.AsError(err).Code != devices.CodeDeviceUnknown {
				t.Fatal(err)
			}
		}
		if _, err := s.Approve(w.Code); err == nil || devices.AsError(err).Code != devices.CodeForbidden {
			t.Errorf("the right code after %d wrong ones: %v", devices.MaxWrongCodes, err)
		}
		time.Sleep(2 * time.Minute)
		if _, err := s.Approve(w.Code); err != nil {
			t.Errorf("a minute later: %v", err)
		}
	})
}

func TestRevokeAndForgetKillCredentials(t *testing.T) {
	bubble(t, devices.Config{}, func(t *testing.T, p *devicetest.Ports, s *devices.Service) {
		check(t, s, "c1")
		conn := connect(t, s, "c1", devicetest.NewScript())
		if err := s.Revoke(id); err != nil {
			t.Fatal(err)
		}
		if conn.reason() != devices.CloseRevoked {
			t.Errorf("the session was closed as %q", conn.reason())
		}
		if _, ok := s.Generation(id); ok {
			t.Error("credentials are valid after revocation")
		}
		if w := check(t, s, "c1"); w.Admitted {
			t.Error("a revoked device is welcome")
		}
		if _, err := s.Approve(string(id)); err != nil {
			t.Fatal(err)
		}
		if generation, ok := s.Generation(id); !ok || generation != 1 {
			t.Errorf("generation %d, %v", generation, ok)
		}
		if err := s.Forget(t.Context(), id); err != nil {
			t.Fatal(err)
		}
		if generation, _ := s.Generation(id); generation != 2 {
			t.Errorf("a forgotten device has generation %d, want 2", generation)
		}
		if w := check(t, s, "c9"); !w.Admitted || w.Generation != 2 {
			t.Errorf("it may come back with new credentials: %+v", w)
		}
		// A node that starts from the records knows all of it.
		next := devicetest.New()
		next.Exceptions = p.Exceptions
		again := next.Service(t, devices.Config{})
		defer again.Close()
		if generation, ok := again.Generation(id); generation != 2 || !ok {
			t.Errorf("after a restart: generation %d, %v", generation, ok)
		}
	})
}

// A device that was never admitted has no credentials that could come back: it
// leaves nothing behind, neither when an operator forgets it nor when its code
// was not used for a day. One that was admitted leaves its exception.
func TestStrangersLeaveNoException(t *testing.T) {
	bubble(t, devices.Config{Approve: true}, func(t *testing.T, p *devicetest.Ports, s *devices.Service) {
		come := func(n int) devices.ID {
			id := devices.ID(fmt.Sprintf("02:00:00:00:02:%02x", n))
			if _, err := s.CheckIn(devices.CheckIn{Device: id, ClientID: "c"}); err != nil {
				t.Fatal(err)
			}
			return id
		}
		if err := s.Forget(t.Context(), come(1)); err != nil {
			t.Fatal(err)
		}
		come(2)
		time.Sleep(25 * time.Hour)
		synctest.Wait()
		// security: D15
		if len(p.Devices) != 0 || len(p.Exceptions) != 0 {
			t.Errorf("%d devices and exceptions %+v are left of strangers", len(p.Devices), p.Exceptions)
		}
		admitted := come(3)
		if _, err := s.Approve(string(admitted)); err != nil {
			t.Fatal(err)
		}
		if err := s.Forget(t.Context(), admitted); err != nil {
			t.Fatal(err)
		}
		if s.Accepts(admitted, 0) || len(p.Exceptions) != 1 {
			t.Errorf("the credentials of a forgotten member are good: %+v", p.Exceptions)
		}
		revoked := come(4)
		if _, err := s.Approve(string(revoked)); err != nil {
			t.Fatal(err)
		}
		if err := errors.Join(s.Revoke(revoked), s.Forget(t.Context(), revoked)); err != nil {
			t.Fatal(err)
		}
		if s.Accepts(revoked, 0) || s.Accepts(revoked, 1) {
			t.Error("the credentials of a device that was revoked and forgotten are good")
		}
	})
}

package fleet_test

import (
	"encoding/json"
	"errors"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"

	"fleetd/internal/access"
	"fleetd/internal/audit"
	"fleetd/internal/devices"
	"fleetd/internal/devices/dispatch"
	"fleetd/internal/devicetest"
	"fleetd/internal/fleet"
)

// reserve takes the slot of the device.
func reserve(t *testing.T, s *fleet.Service) *dispatch.Reservation {
	t.Helper()
	r, err := s.Reserve(id, true)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func permitted() error { return nil }

func lampOn(by access.Principal) devices.ToolCall {
	return devices.ToolCall{Principal: by, Device: id, Tool: "self.lamp.set", Arguments: json.RawMessage(`{"on":true}`)}
}

// A reservation holds a slot of the device: a second one is refused, calls of others wait, and both go on when it is
// released. Without a session there is none.
func TestReservationHoldsASlot(t *testing.T) {
	guarded(t, func(t *testing.T, _ *devicetest.Ports, s *fleet.Service, asked *atomic.Int32, _ *pipe) {
		if _, err := s.Reserve("02:00:00:00:00:99", true); !errors.Is(err, devices.ErrNoHolder) || s.IsBusy("02:00:00:00:00:99", true) || s.IsBusy(id, false) {
			t.Errorf("of a device without a session: %v", err)
		}
		r := reserve(t, s)
		if !s.IsBusy(id, false) {
			t.Error("a device without a free slot is not busy")
		}
		if _, err := s.Reserve(id, true); devices.AsError(err).Code != devices.CodeDeviceBusy {
			t.Errorf("a second one: %v", err)
		}
		var other sync.WaitGroup
		other.Go(func() {
			if _, err := callBy(t, s, devicetest.Admin, "self.lamp.set", `{"on":false}`, ""); err != nil {
				t.Errorf("the call that waited: %v", err)
			}
		})
		synctest.Wait()
		if asked.Load() != 0 {
			t.Error("a call did not wait for the reservation")
		}
		result, err := r.Call(t.Context(), lampOn(access.Principal{Caller: access.Admin, Via: access.ViaJob}), permitted)
		if err != nil || asked.Load() != 1 || result.IsError || result.Call == "" || !r.IsCurrent() {
			t.Errorf("%+v, %v, %d calls", result, err, asked.Load())
		}
		if n := s.Stats().Calls.Get(dispatch.CallKey{Outcome: audit.OutcomeOK, Via: access.ViaJob}); n != 1 {
			t.Errorf("the call of the job is counted %d times", n)
		}
		r.Release()
		other.Wait()
		if asked.Load() != 2 {
			t.Errorf("%d calls after the release", asked.Load())
		}
		reserve(t, s).Release()
	})
}

// A restart waits neither for the tools of a device nor for an answer to MCP, a call does.
func TestReservationForAMessageNeedsNoTools(t *testing.T) {
	bubble(t, fleet.Config{CallsPerDevice: 1}, func(t *testing.T, _ *devicetest.Ports, s *fleet.Service) {
		script := devicetest.NewScript()
		script.Other = func(devicetest.Request) string { return "silent" }
		conn := connect(t, s, "c1", script)
		synctest.Wait()
		if _, err := s.Reserve(id, true); devices.AsError(err).Code != devices.CodeDeviceBusy {
			t.Errorf("for a call while the tools are being read: %v", err)
		}
		r, err := s.Reserve(id, false)
		if err != nil {
			t.Fatal(err)
		}
		if err := r.Message(t.Context(), devices.Message{Device: id, Principal: devicetest.Admin, Body: json.RawMessage(devices.RestartMessage)}, permitted); err != nil {
			t.Error(err)
		}
		if synctest.Wait(); conn.path.last("reboot").IsZero() {
			t.Error("the device did not receive the restart")
		}
	})
}

// Nothing is sent that is refused: by the one who permits, last; by the key that has ended; by the rules, the schema, or
// the name of the tool.
func TestReservationIsJudged(t *testing.T) {
	guarded(t, func(t *testing.T, p *devicetest.Ports, s *fleet.Service, asked *atomic.Int32, conn *pipe) {
		scopes, _ := access.ParseScopes([]string{"tools:call", "audio"})
		k, _, err := s.CreateKey(t.Context(), devicetest.Admin, fleet.NewKeyParams{Name: "short", Scopes: scopes})
		if err != nil {
			t.Fatal(err)
		}
		who, _ := s.Keys().Caller(k.ID)
		owner := access.Principal{Caller: who, Via: access.ViaJob}
		r := reserve(t, s)
		defer r.Release()
		refused := func(what string, c devices.ToolCall, permit func() error, want devices.Code) {
			t.Helper()
			_, err := r.Call(t.Context(), c, permit)
			if err == nil || devices.AsError(err).Code != want || devices.AsError(err).Sent || asked.Load() != 0 {
				t.Fatalf("%s: %v, %d calls, want %s", what, err, asked.Load(), want)
			}
		}
		taken := devices.Errorf(devices.CodeUnavailable, "the lease is over")
		refused("not permitted", lampOn(owner), func() error { return taken }, devices.CodeUnavailable)
		bad := lampOn(owner)
		bad.Arguments = json.RawMessage(`{"on":7}`)
		permits := 0
		refused("arguments", bad, func() error { permits++; return nil }, devices.CodeInvalidArguments)
		bad = lampOn(owner)
		bad.Tool = "self.\x00"
		refused("no name of a tool", bad, func() error { permits++; return nil }, devices.CodeBadRequest)
		if permits != 0 {
			t.Errorf("%d times the permission was requested to send what is refused", permits)
		}
		if err := r.Message(t.Context(), devices.Message{Principal: owner, Device: id, Body: json.RawMessage(`{"type":"llm","emotion":"happy"}`)}, func() error { return taken }); devices.AsError(err).Code != devices.CodeUnavailable {
			t.Errorf("a message that is not permitted: %v", err)
		}
		if _, _, err := s.RevokeKey(t.Context(), devicetest.Admin, "short"); err != nil {
			t.Fatal(err)
		}
		// security: K21
		refused("the key has ended", lampOn(owner), permitted, devices.CodeUnauthorized)
		err = r.Message(t.Context(), devices.Message{Principal: owner, Device: id, Body: json.RawMessage(`{"type":"llm","emotion":"happy"}`)}, permitted)
		// security: K21
		if err == nil || devices.AsError(err).Code != devices.CodeUnauthorized {
			t.Errorf("a message of a key that has ended: %v", err)
		}
		for _, m := range conn.script.Messages() {
			if strings.Contains(m, "happy") {
				t.Errorf("sent: %s", m)
			}
		}
		if err := r.Message(t.Context(), devices.Message{Principal: devicetest.Admin, Device: id, Body: json.RawMessage(`{"type":"llm","emotion":"happy"}`)}, permitted); err != nil {
			t.Errorf("a message that is permitted: %v", err)
		}
		devicetest.SetPolicy(t, s, access.Policy{Rules: []access.Rule{{Name: "never", Tools: []string{"self.lamp.*"}, Action: access.Deny}}})
		refused("a rule", lampOn(devicetest.Admin), permitted, devices.CodeToolDenied)
	})
}

// What is sent with a reservation goes to its session or nowhere: not to the one that replaced it.
func TestReservationOfAReplacedSession(t *testing.T) {
	guarded(t, func(t *testing.T, _ *devicetest.Ports, s *fleet.Service, asked *atomic.Int32, conn *pipe) {
		r := reserve(t, s)
		if !r.IsTalking() {
			t.Error("its conversation is open")
		}
		next := connect(t, s, "c1", conn.script)
		ready(t, s)
		if r.IsCurrent() || next.session == conn.session {
			t.Error("the session is still the device's")
		}
		_, err := r.Call(t.Context(), lampOn(devicetest.Admin), permitted)
		if err == nil || devices.AsError(err).Code != devices.CodeSuperseded || devices.AsError(err).Sent || asked.Load() != 0 {
			t.Errorf("%v, %d calls", err, asked.Load())
		}
		if err := r.Message(t.Context(), devices.Message{Principal: devicetest.Admin, Device: id, Body: json.RawMessage(`{"type":"llm","emotion":"happy"}`)}, permitted); err == nil || devices.AsError(err).Code != devices.CodeSuperseded {
			t.Errorf("a message: %v", err)
		}
		r.Release()
		other := reserve(t, s)
		defer other.Release()
		if _, err := other.Call(t.Context(), lampOn(devicetest.Admin), permitted); err != nil || asked.Load() != 1 {
			t.Errorf("of the new session: %v, %d calls", err, asked.Load())
		}
	})
}

package mqttdevice_test

import (
	"strings"
	"testing"
	"time"

	"fleetd/internal/devices/admission"
	"fleetd/internal/lobby"
)

// Who tries passwords hears CONNACK 5, late; a device with the right one comes
// in at once, from the same address.
func TestWrongPasswordsAreSlowedDown(t *testing.T) {
	t.Parallel()
	b := ground(t)
	b.options.Failures = lobby.NewFailures(nil)
	b.listen(t)
	if _, err := b.service.CheckIn(t.Context(), admission.CheckIn{Device: id, ClientID: "c"}); err != nil {
		t.Fatal(err)
	}
	wrong := b.login(id, "c")
	wrong.password = "guess"
	knock := func() (string, time.Duration) {
		begun := time.Now()
		d, err := connect("tcp://"+b.address, wrong, id, false)
		if err == nil {
			d.Close()
			return "", 0
		}
		return err.Error(), time.Since(begun)
	}
	for range lobby.FailureBurst {
		if said, took := knock(); !strings.Contains(said, "bad user name or password") || took > lobby.FailureDelay/2 {
			t.Fatalf("%q after %v", said, took)
		}
	}
	late := make(chan struct{})
	go func() {
		defer close(late)
		// security: D7
		if said, took := knock(); !strings.Contains(said, "not Authorized") || took < lobby.FailureDelay {
			t.Errorf("one too many: %q after %v", said, took)
		}
	}()
	begun := time.Now()
	d := b.dial(t, id, "c")
	defer d.Close()
	// security: D7
	if took := time.Since(begun); took > lobby.FailureDelay/2 {
		t.Errorf("the right password waits %v", took)
	}
	<-late
}

package mqttdevice_test

import (
	"strings"
	"testing"
	"time"

	"fleetd/internal/connlimit"
	"fleetd/internal/devices/admission"
)

// Clients that try passwords get CONNACK 5 after a delay; a device with the right
// password is admitted at once from the same address.
func TestWrongPasswordsAreSlowedDown(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	b.options.Failures = connlimit.NewFailures(nil)
	b.listen(t)
	if _, err := b.service.CheckIn(t.Context(), admission.CheckIn{Device: id, ClientID: "c"}); err != nil {
		t.Fatal(err)
	}
	wrong := b.login(id, "c")
	wrong.Password = "guess"
	attempt := func() (string, time.Duration) {
		begun := time.Now()
		d, err := connect("tcp://"+b.address, wrong, id, false)
		if err == nil {
			d.Close()
			return "", 0
		}
		return err.Error(), time.Since(begun)
	}
	for range connlimit.FailureBurst {
		if now, took := attempt(); !strings.Contains(now, "bad user name or password") || took > connlimit.FailureDelay/2 {
			t.Fatalf("%q after %v", now, took)
		}
	}
	late := make(chan struct{})
	go func() {
		defer close(late)
		// security: D7
		if now, took := attempt(); !strings.Contains(now, "not authorized") || took < connlimit.FailureDelay {
			t.Errorf("above the limit: %q after %v", now, took)
		}
	}()
	begun := time.Now()
	d := b.dial(t, id, "c")
	defer d.Close()
	// security: D7
	if took := time.Since(begun); took > connlimit.FailureDelay/2 {
		t.Errorf("the right password is delayed by %v", took)
	}
	<-late
}

package fleettest

import (
	"os"
	"strconv"
	"testing"
	"time"
)

// shortScale is the factor by which the nodes' leases, beats and pings shrink
// under `go test -short`, and with them what the tests wait for.
const shortScale = 0.3

func scale() float64 {
	if testing.Short() {
		return shortScale
	}
	return 1
}

// scaled is a time that follows from leases, beats or pings.
func scaled(d time.Duration) time.Duration { return time.Duration(float64(d) * scale()) }

// shortPatience is how many times as long Await waits in short tests, beside which others compute: it ends as soon as what
// it waits for is there, and what must be there within a time is measured.
const shortPatience = 3

// scaledWait is scaled for what must happen in time. In short tests everything
// else runs beside, which does not shrink.
func scaledWait(d time.Duration) time.Duration {
	if testing.Short() {
		return scaled(d) + 2*time.Second
	}
	return d
}

// inVerify starts the reason for which a test is left out under `go test
// -short`: `make verify` runs it.
const inVerify = "IN VERIFY: "

// long leaves the test out of `make test`.
func long(t testing.TB) {
	t.Helper()
	if testing.Short() {
		t.Skip(inVerify + "takes longer than a minute")
	}
}

// setting is a number from the environment for full-size runs.
func setting(t testing.TB, name string, normal int) int {
	t.Helper()
	text := os.Getenv(name)
	if text == "" {
		return normal
	}
	n, err := strconv.Atoi(text)
	if err != nil || n <= 0 {
		t.Fatalf("%s=%q is not a number", name, text)
	}
	return n
}

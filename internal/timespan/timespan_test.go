package timespan_test

import (
	"testing"
	"time"

	"fleetd/internal/timespan"
)

func TestParse(t *testing.T) {
	t.Parallel()
	const day = 24 * time.Hour
	for text, want := range map[string]time.Duration{
		"90s": 90 * time.Second, "2h30m": 150 * time.Minute, "1d": day, "30d": 30 * day, "1d12h": 36 * time.Hour, "0d": 0, "-5s": -5 * time.Second,
	} {
		got, err := timespan.Parse(text)
		if err != nil || got != want {
			t.Errorf("%q: %v, %v, want %v", text, got, err, want)
		}
		if again, err := timespan.Parse(timespan.Format(got)); err != nil || again != got {
			t.Errorf("%q is written as %q", text, timespan.Format(got))
		}
	}
	for _, text := range []string{"", "d", "1", "-1d", "1.5d", "1d1", "1d-5h", "99999d", "1dd", "12hd", "1d3000000h"} {
		if got, err := timespan.Parse(text); err == nil {
			t.Errorf("%q is read as %v", text, got)
		}
	}
}

func TestFormat(t *testing.T) {
	t.Parallel()
	for d, want := range map[time.Duration]string{7 * 24 * time.Hour: "7d", 36 * time.Hour: "1d12h", 90 * time.Second: "1m30s", time.Hour: "1h", 15 * time.Minute: "15m"} {
		if got := timespan.Format(d); got != want {
			t.Errorf("%v is written as %q, want %q", d, got, want)
		}
	}
}

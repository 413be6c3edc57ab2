package node

import (
	"bytes"
	"log/slog"
	"strings"
	"testing"
)

// Clients of the embedded NATS cannot fill the log, and a line contains the number of dropped lines.
func TestNATSLogIsBounded(t *testing.T) {
	var written bytes.Buffer
	l := newNATSLog(slog.New(slog.NewTextHandler(&written, nil)))
	for range 10_000 {
		l.Errorf("Permissions Violation for %q", "x")
		l.Warnf("slow")
	}
	// security: N44
	if lines := strings.Count(written.String(), "\n"); lines < natsLogBurst || lines > 3*natsLogBurst {
		t.Errorf("%d lines", lines)
	}
	l.rate.SetBurst(1_000_000)
	l.rate.SetLimit(1e9)
	l.Errorf("one more")
	if !strings.Contains(written.String(), "one more") || !strings.Contains(written.String(), "lines_left_out=199") {
		t.Errorf("...%s", written.String()[max(0, written.Len()-300):])
	}
}

package devices

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"sync"
	"testing"
	"time"
)

func TestCallIDs(t *testing.T) {
	form := regexp.MustCompile(`^[a-z2-7]{16}$`)
	start := time.UnixMilli(1_700_000_000_000)
	ids, seen := NewCallIDs("node-a", start), sync.Map{}
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for range 1000 {
				id := ids.Next()
				if _, twice := seen.LoadOrStore(id, true); twice || !form.MatchString(id) {
					t.Errorf("id %q, twice %v", id, twice)
				}
			}
		})
	}
	wg.Wait()
	a := NewCallIDs("node-a", start).Next()
	if b, c := NewCallIDs("node-b", start).Next(), NewCallIDs("node-a", start.Add(time.Second)).Next(); a == b || a == c || a[:3] != c[:3] || a[3:7] != b[3:7] {
		t.Errorf("%s, on another node %s, of the next process %s", a, b, c)
	}
}

func TestOfCall(t *testing.T) {
	shared := Errorf(CodeDeviceBusy, "wait")
	err := WithCallID(shared, "id")
	if e := AsError(err); e.Call != "id" || e.Code != CodeDeviceBusy || shared.Call != "" {
		t.Errorf("%+v, the shared error is %+v", e, shared)
	}
	if e := AsError(WithCallID(errors.New("odd"), "id")); e.Call != "id" || e.Code != CodeInternal {
		t.Errorf("%+v", e)
	}
	if WithCallID(nil, "id") != nil {
		t.Error("nil became an error")
	}
	back, ok := ParseProblem(AsError(err).Problem().JSON())
	if !ok || back.Call != "id" {
		t.Errorf("%+v", back)
	}
}

// The detail tells a database that is slow from one that is away: the first wants a smaller request, the second an operator.
func TestSlowDatabase(t *testing.T) {
	for _, tc := range []struct {
		err  error
		want string
	}{
		{fmt.Errorf("%w: listing: %w", ErrDatabase, context.DeadlineExceeded), "the database is slow, and did not answer in time; ask for less, or try again later"},
		{fmt.Errorf("%w: listing: refused", ErrDatabase), "the database does not answer; try again later"},
	} {
		if e := AsError(tc.err); e.Code != CodeUnavailable || e.Part != "database" || e.Detail != tc.want {
			t.Errorf("%v: %+v", tc.err, e)
		}
	}
}

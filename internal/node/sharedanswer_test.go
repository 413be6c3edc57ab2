package node

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

// Many requests for the metrics at once are one piece of work at a time, and none gets an
// answer that was begun before it came.
func TestMetricsAreCollectedOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var made, atOnce, most, now atomic.Int64
		shared := newSharedAnswer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			most.Store(max(most.Load(), atOnce.Add(1)))
			defer atOnce.Add(-1)
			made.Add(1)
			w.Header().Set("Content-Type", r.Header.Get("Accept"))
			_, _ = fmt.Fprint(w, now.Load())
			time.Sleep(20 * time.Millisecond)
		}))
		get := func(accept string) *httptest.ResponseRecorder {
			r := httptest.NewRequest("GET", "/metrics", nil)
			r.Header.Set("Accept", accept)
			w := httptest.NewRecorder()
			shared.ServeHTTP(w, r)
			return w
		}
		const clients, times = 60, 5
		var tasks sync.WaitGroup
		for i := range clients {
			tasks.Go(func() {
				accept := fmt.Sprint("text/", i%2)
				for range times {
					before := now.Add(1)
					w := get(accept)
					var value int64
					if _, err := fmt.Sscan(w.Body.String(), &value); err != nil || value < before {
						t.Errorf("an answer of %q to a request of %d: %v", w.Body, before, err)
					}
					if got := w.Header().Get("Content-Type"); got != accept {
						t.Errorf("%q for %q", got, accept)
					}
				}
			})
		}
		tasks.Wait()
		// security: N42
		if made.Load() > clients*times/4 || most.Load() != 1 {
			t.Errorf("%d requests are %d pieces of work, up to %d at once", clients*times, made.Load(), most.Load())
		}
	})
}

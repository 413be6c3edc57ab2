package background

import "testing"

// Only what Run runs has a lower priority: its threads never come back to other goroutines.
func TestPriority(t *testing.T) {
	nice := func() int {
		n, err := threadNice()
		if err != nil {
			t.Error(err)
		}
		return n
	}
	threads, usual := New(), nice()
	for range 50 {
		threads.Run(func() {
			// security: N43
			if got := nice(); got != min(usual+niceness, 19) {
				t.Errorf("nice %d inside, want %d more than %d", got, niceness, usual)
			}
		})
		if got := nice(); got != usual {
			t.Fatalf("nice %d after Run, was %d", got, usual)
		}
	}
}

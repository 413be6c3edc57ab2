package load

import (
	"sync"
	"sync/atomic"
)

// InParallel does n numbered things with some workers. make prepares a worker and names what it does and how it ends.
func InParallel(workers, n int, make func() (do func(i int) error, end func(), err error)) error {
	var next atomic.Int64
	var wg sync.WaitGroup
	var once sync.Once
	var first error
	fail := func(err error) {
		once.Do(func() { first = err })
		next.Store(int64(n))
	}
	for range min(workers, n) {
		wg.Go(func() {
			do, end, err := make()
			if err != nil {
				fail(err)
				return
			}
			defer end()
			for i := int(next.Add(1) - 1); i < n; i = int(next.Add(1) - 1) {
				if err := do(i); err != nil {
					fail(err)
					return
				}
			}
		})
	}
	wg.Wait()
	return first
}

package main

import (
	"fmt"
	"sync"

	"golang.org/x/sys/unix"
)

// pin binds this thread, and processes that it starts, to one of the first two processors that the program may use.
func pin(which int) error {
	allowed, err := processors()
	if err != nil {
		return err
	}
	if which >= len(allowed) {
		return fmt.Errorf("udpaudio needs %d processors; %d may be used", which+1, len(allowed))
	}
	var set unix.CPUSet
	set.Set(allowed[which])
	return unix.SchedSetaffinity(0, &set)
}

// processors are those that the program might use when it began.
var processors = sync.OnceValues(func() (allowed []int, err error) {
	var set unix.CPUSet
	if err := unix.SchedGetaffinity(0, &set); err != nil {
		return nil, err
	}
	for i := range len(set) * 64 {
		if set.IsSet(i) {
			allowed = append(allowed, i)
		}
	}
	return allowed, nil
})

package main

import (
	"os"
	"runtime"
	"runtime/debug"
	"time"

	"fleetd/bench/load"
)

// state is what a server reports about its process.
type state struct {
	Resident int64 // bytes
	Mallocs  uint64
	CPU      time.Duration
}

func ownState() (state, error) {
	var memory runtime.MemStats
	runtime.ReadMemStats(&memory)
	resident, err := load.ResidentSize(os.Getpid())
	return state{Resident: resident, Mallocs: memory.Mallocs, CPU: load.OwnCPU()}, err
}

// server is the process of a server.
type server struct{ *load.Child }

// startServer runs this program again as the server of a program.
func startServer(environment []string, arguments ...string) (server, error) {
	c, err := load.StartChild("", environment, append([]string{serverCommand}, arguments...)...)
	return server{c}, err
}

// Questions that every server answers.
const (
	askState     = "state"
	askCollected = "collected" // the state after a garbage collection that returns free memory to the kernel
)

func (s server) state() (v state, err error)     { return v, s.Ask(askState, &v) }
func (s server) collected() (v state, err error) { return v, s.Ask(askCollected, &v) }

// answer answers questions until the input ends. more answers those that only this server can answer; nil for none.
func answer(address string, more func(question string) any) error {
	return load.Answer(address, func(question string) (any, error) {
		switch question {
		case askCollected:
			runtime.GC() // pools keep what they hold for one collection
			debug.FreeOSMemory()
			time.Sleep(200 * time.Millisecond)
			fallthrough
		case askState:
			return ownState()
		}
		if more == nil {
			return nil, nil
		}
		return more(question), nil
	})
}

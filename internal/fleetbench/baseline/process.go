package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"runtime/debug"
	"strings"
	"syscall"
	"time"

	"fleetd/internal/fleetbench/load"
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
	return state{Resident: resident, Mallocs: memory.Mallocs, CPU: ownCPU()}, err
}

// ownCPU is the user and system time of this process.
func ownCPU() time.Duration {
	var usage syscall.Rusage
	if syscall.Getrusage(syscall.RUSAGE_SELF, &usage) != nil {
		return 0
	}
	return time.Duration(usage.Utime.Nano() + usage.Stime.Nano())
}

// server is the process of a server, which ends when its input does.
type server struct {
	command *exec.Cmd
	address string
	in      io.WriteCloser
	out     *bufio.Reader
}

// ready begins the line that a server prints when it takes connections; its address follows.
const ready = "READY "

// startServer runs this program again as the server of a program.
func startServer(environment []string, arguments ...string) (*server, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	c := exec.Command(self, append([]string{serverCommand}, arguments...)...)
	c.Env = append(os.Environ(), environment...)
	c.Stderr = os.Stderr
	in, inErr := c.StdinPipe()
	out, outErr := c.StdoutPipe()
	if err := errors.Join(inErr, outErr); err != nil {
		return nil, err
	}
	if err := c.Start(); err != nil {
		return nil, err
	}
	s := &server{command: c, in: in, out: bufio.NewReader(out)}
	line, err := s.out.ReadString('\n')
	address, found := strings.CutPrefix(strings.TrimSpace(line), ready)
	if !found {
		s.stop()
		return nil, errors.Join(fmt.Errorf("the server of %s does not start: it prints %q", arguments[0], line), err)
	}
	s.address = address
	return s, nil
}

// stopLimit is how long a server may take to end.
const stopLimit = 5 * time.Second

func (s *server) stop() {
	_ = s.in.Close()
	timer := time.AfterFunc(stopLimit, func() { _ = s.command.Process.Kill() })
	defer timer.Stop()
	_ = s.command.Wait() // how it ended is of no interest
}

// ask sends a line and reads the answer into v.
func (s *server) ask(question string, v any) error {
	if _, err := fmt.Fprintln(s.in, question); err != nil {
		return fmt.Errorf("ask the server for %q: %w", question, err)
	}
	line, err := s.out.ReadBytes('\n')
	if err != nil {
		return fmt.Errorf("the server's answer to %q: %w", question, err)
	}
	return json.Unmarshal(line, v)
}

// Questions that every server answers.
const (
	askState     = "state"
	askCollected = "collected" // the state after a garbage collection that returns free memory to the kernel
)

func (s *server) state() (v state, err error)     { return v, s.ask(askState, &v) }
func (s *server) collected() (v state, err error) { return v, s.ask(askCollected, &v) }

// answer says that a server is ready, and answers questions until the input ends. more answers those that only this server
// knows; nil for none.
func answer(address string, more func(question string) any) error {
	fmt.Println(ready + address)
	out := json.NewEncoder(os.Stdout)
	for lines := bufio.NewScanner(os.Stdin); lines.Scan(); {
		var v any
		var err error
		switch question := lines.Text(); question {
		case askCollected:
			runtime.GC() // pools keep what they hold for one collection
			debug.FreeOSMemory()
			time.Sleep(200 * time.Millisecond)
			fallthrough
		case askState:
			v, err = ownState()
		default:
			if more != nil {
				v = more(question)
			}
		}
		if err := errors.Join(err, out.Encode(v)); err != nil {
			return err
		}
	}
	return nil
}

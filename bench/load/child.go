package load

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"time"
)

// Child is a process that serves something: it prints READY and its address, answers each line of its input with one line of
// JSON, and ends when its input does. One goroutine at a time.
type Child struct {
	Address string
	command *exec.Cmd
	in      io.WriteCloser
	out     *bufio.Reader
}

const (
	childReady = "READY "
	childStop  = 30 * time.Second // how long it may take to end
)

// StartChild runs a program as a server; empty: this program. If this program is killed, its input ends, and so does it. The
// kernel is not asked to kill it: that would happen at the end of the thread that started it, too. An interruption of the
// terminal does not reach it.
func StartChild(program string, environment []string, arguments ...string) (*Child, error) {
	if program == "" {
		self, err := os.Executable()
		if err != nil {
			return nil, err
		}
		program = self
	}
	c := exec.Command(program, arguments...)
	c.Env, c.Stderr = append(os.Environ(), environment...), os.Stderr
	apartFromTerminal(c)
	in, inErr := c.StdinPipe()
	out, outErr := c.StdoutPipe()
	if err := errors.Join(inErr, outErr); err != nil {
		return nil, err
	}
	if err := c.Start(); err != nil {
		return nil, err
	}
	s := &Child{command: c, in: in, out: bufio.NewReader(out)}
	line, err := s.out.ReadString('\n')
	address, found := strings.CutPrefix(strings.TrimSpace(line), childReady)
	if !found {
		s.Stop()
		return nil, errors.Join(fmt.Errorf("the server %s does not start: it prints %q", strings.Join(arguments, " "), line), err)
	}
	s.Address = address
	return s, nil
}

// PID is the number of the process.
func (s *Child) PID() string { return strconv.Itoa(s.command.Process.Pid) }

// Ask sends a line and reads the answer into v.
func (s *Child) Ask(question string, v any) error {
	if _, err := fmt.Fprintln(s.in, question); err != nil {
		return fmt.Errorf("ask the server for %q: %w", question, err)
	}
	line, err := s.out.ReadBytes('\n')
	if err != nil {
		return fmt.Errorf("the server's answer to %q: %w", question, err)
	}
	return json.Unmarshal(line, v)
}

// Stop ends the process, by force if it takes too long.
func (s *Child) Stop() {
	_ = s.in.Close() // ends it
	timer := time.AfterFunc(childStop, func() { _ = s.command.Process.Kill() })
	defer timer.Stop()
	_ = s.command.Wait() // how it ended is of no interest
}

// Answer is the other side of a Child: it reports that the server takes connections, and answers until its input ends.
func Answer(address string, answer func(question string) (any, error)) error {
	fmt.Println(childReady + address)
	out := json.NewEncoder(os.Stdout)
	for lines := bufio.NewScanner(os.Stdin); lines.Scan(); {
		v, err := answer(lines.Text())
		if err := errors.Join(err, out.Encode(v)); err != nil {
			return err
		}
	}
	return nil
}

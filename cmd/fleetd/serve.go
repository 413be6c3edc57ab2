package main

import (
	"context"
	"fmt"
	"reflect"

	"github.com/alecthomas/kong"

	"fleetd/internal/config"
	"fleetd/internal/node"
)

// serveCmd runs a node. Its flags are made from the table of settings, so that there is no second list of them.
type serveCmd struct {
	kong.Plugins
}

func newServeCmd() serveCmd {
	var fields []reflect.StructField
	for i, f := range config.Flags() {
		tag := fmt.Sprintf("name:%q help:%q group:%q", f.Name, f.Help+" ($"+f.Env+")", f.Group)
		if f.Default != "" {
			tag += fmt.Sprintf(" placeholder:%q", f.Default)
		}
		fields = append(fields, reflect.StructField{
			Name: fmt.Sprintf("Setting%d", i),
			Type: reflect.TypeFor[*string](), // nil: not given
			Tag:  reflect.StructTag(tag),
		})
	}
	return serveCmd{kong.Plugins{reflect.New(reflect.StructOf(fields)).Interface()}}
}

// given returns the flags of the command line.
func (s *serveCmd) given() map[string]string {
	given := make(map[string]string)
	values := reflect.ValueOf(s.Plugins[0]).Elem()
	for i, f := range config.Flags() {
		if value, ok := values.Field(i).Interface().(*string); ok && value != nil {
			given[f.Name] = *value
		}
	}
	return given
}

// exitSettings is the status of a node that does not start because of a setting: EX_CONFIG of sysexits.h. A service
// manager need not try again.
const exitSettings = 78

// Run runs the node until the context ends and it has drained.
func (s *serveCmd) Run(ctx context.Context, a *app) error {
	cfg, err := config.Load(s.given(), a.environ)
	if err != nil {
		return exitError{err, exitSettings}
	}
	node.LimitMemory(a.environ)
	node.UseThreads(a.environ)
	cfg.Version = currentBuild().version
	if err := node.Run(ctx, cfg); err != nil {
		return exitError{err, exitFailed}
	}
	return nil
}

"""Options: one declaration gives an option's type, bounds, help, its text and value, and its errors."""

from mtbench.options.classes import AUTO as AUTO
from mtbench.options.classes import option as option
